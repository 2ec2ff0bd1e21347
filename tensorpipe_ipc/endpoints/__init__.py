"""The two ends of one path, ``Producer`` and ``Consumer``, and their conversation."""
