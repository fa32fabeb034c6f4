"""Processes as the kernel shows them under /proc: no torch, no signals, nothing is stopped. No /proc: empty answers."""
