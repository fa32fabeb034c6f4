"""TM8xx: the process, its workers, the host."""
