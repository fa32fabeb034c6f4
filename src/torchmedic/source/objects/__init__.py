"""Live objects of the user: what is inside them, read without running code of the user."""
