"""`report.html`: `run_data` reads a run folder, `views` prepares what is shown, `charts` draws, `page` renders."""
