"""Dispatch modes and graph walks that record what a replay does."""
