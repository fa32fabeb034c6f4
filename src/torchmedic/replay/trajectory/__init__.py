"""Several steps in a row, replayed from a copy of the weights, with one thing changed."""
