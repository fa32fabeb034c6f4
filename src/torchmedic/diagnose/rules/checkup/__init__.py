"""TM63x and TM64x: what the graphs of the first steps show. Training runs, and does not learn what was written."""
