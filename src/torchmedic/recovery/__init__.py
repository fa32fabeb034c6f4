"""Recovery from an out-of-memory: the call that failed is repeated with more room, and training goes on unchanged."""
