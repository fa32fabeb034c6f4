"""Rules for runs that are slow and do not hang (TM550 to TM558)."""
