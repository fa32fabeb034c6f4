"""Requests to CUDA answered on the CPU."""
