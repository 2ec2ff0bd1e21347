"""Side-by-side comparisons with what people use today. Imports the package; the package never imports it.

``python -m bench all``: everybody, on one page; ``growth``: what grows with what; ``page``: the page again, from its
results; ``serializers``, ``endpoints``, ``queue``, ``dataloader`` and ``precision``: one thing each, in depth. One
file or folder per command, with ``add_arguments`` and ``run``.
"""
