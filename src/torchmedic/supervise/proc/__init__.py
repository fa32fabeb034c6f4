"""Reads processes from /proc, without torch, signals or stops. Without /proc, all results are empty."""
