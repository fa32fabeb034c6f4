"""`report.html`: `run_data` reads a run folder, `series` and `holders` prepare data, `charts` draws, `page` renders."""
