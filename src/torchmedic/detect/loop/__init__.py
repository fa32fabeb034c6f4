"""The ledger of the loop -> an incident of a kind."""
