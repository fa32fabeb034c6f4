"""Checks before a run for causes of hangs and freezes: the host, the GPUs, the torch build, the script."""
