"""Incident -> Evidence: look at the failing step while its frames are alive."""
