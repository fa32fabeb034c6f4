"""What the source says about a holder or a call when memory ran out."""
