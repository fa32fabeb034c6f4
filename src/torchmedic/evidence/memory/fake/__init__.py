"""The step on fake tensors: bytes by line, and the peak."""
