"""Which tensor is on the wrong device, and why."""
