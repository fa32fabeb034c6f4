"""Detects that a run makes no progress, and examines why."""
