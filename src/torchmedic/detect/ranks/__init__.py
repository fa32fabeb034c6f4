"""The ranks of a job compared with each other: which of them left the common way, and where."""
