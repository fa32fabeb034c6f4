"""The ledger of what the user's training loop does (TM60x)."""
