"""TM3xx: CUDA, devices, and the index errors that become device-side asserts there."""
