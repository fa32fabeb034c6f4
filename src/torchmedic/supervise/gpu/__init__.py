"""What NVML says about the GPUs."""
