"""TM5xx: the run makes no progress. Each rule is asked about a `Stall`, the specific before the general."""
