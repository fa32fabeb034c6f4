"""TM2xx: numbers that stop being numbers."""
