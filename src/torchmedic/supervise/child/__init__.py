"""Start the child, pass signals on, copy its stderr."""
