"""Output formats of a diagnosis."""
