"""The run folder: its layout, atomic reads and writes, and the parent's questions to a child."""
