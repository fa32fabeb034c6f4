"""A step that can be run again: its runner, its result, a trial of an edit."""
