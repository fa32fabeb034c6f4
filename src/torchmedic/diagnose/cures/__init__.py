"""Candidate edits, and their trials on the failing step."""
