"""Which statements make up a step: the cut, what is bookkeeping, how statements are made runnable."""
