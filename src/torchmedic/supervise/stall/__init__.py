"""Whether a run gets on, and if it does not, why."""
