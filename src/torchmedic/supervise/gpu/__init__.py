"""The GPUs of the host, read through NVML."""
