"""The walk over the user's objects, and which of them grow (TM45x)."""
