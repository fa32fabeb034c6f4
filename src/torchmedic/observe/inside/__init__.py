"""What a process that makes no progress can say of itself, when its parent asks."""
