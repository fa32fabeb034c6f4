"""The step clock, batches, notes for a replay, events.jsonl and the black box."""
