"""Side-by-side comparisons with what people use today. Imports the package; the package never imports it.

``python -m bench serializers``: a tensor to bytes and back. One file per command, with ``add_arguments`` and ``run``.
"""
