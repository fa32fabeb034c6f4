"""The autograd graphs of the first steps (TM63x)."""
