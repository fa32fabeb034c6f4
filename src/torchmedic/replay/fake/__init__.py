"""The step on fake tensors: what both the autopsy of an out-of-memory and `fit` need to follow its memory."""
