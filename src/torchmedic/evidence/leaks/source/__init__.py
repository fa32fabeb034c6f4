"""Which lines of the source fill and empty a holder."""
