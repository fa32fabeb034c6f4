"""What a process that does not get on can say of itself, when its parent asks."""
