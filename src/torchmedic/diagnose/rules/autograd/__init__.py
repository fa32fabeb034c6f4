"""TM10x to TM14x: the autograd graph."""
