"""Rules about several ranks: the rank that left the common way, and where."""
