"""TM6xx: training runs, but not as it was written."""
