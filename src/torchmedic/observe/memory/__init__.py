"""How much memory the process has, may have, and was refused."""
