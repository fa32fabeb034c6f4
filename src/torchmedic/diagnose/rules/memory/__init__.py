"""TM4xx: memory."""
