"""A series of readings -> an alarm: heap, host memory, GPU health."""
