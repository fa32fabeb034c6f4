"""The user's code: ownership, text, syntax, positions, live frames, bindings. No opinions, no replay."""
