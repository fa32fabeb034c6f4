"""Inside the user's process: cheap facts, no opinions. Imported only once torch is there."""
