"""A device that died under a step."""
