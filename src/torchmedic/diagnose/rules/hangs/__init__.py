"""TM5xx: the run does not get on. Each rule is asked about a `Stall`, the specific before the general."""
