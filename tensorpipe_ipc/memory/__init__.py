"""The place of the bytes: a segment, the table of rows at its head, the arena of blocks behind it."""
