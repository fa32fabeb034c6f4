"""Byte accounting: who holds the memory of a device or of the host, each storage once, at no cost of its own."""
