"""Silent mistakes: training runs, and does not learn what was written."""
