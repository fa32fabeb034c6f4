"""How Python code and DataLoader workers end with an exception."""
