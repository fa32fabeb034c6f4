"""Devices that compute asynchronously: late reads, marks, waits, the start of CUDA."""
