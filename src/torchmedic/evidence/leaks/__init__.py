"""A holder that grows: its memory, its lifetime, the lines that fill it."""
