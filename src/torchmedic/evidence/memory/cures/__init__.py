"""Changed steps: their predicted peak, and their trial in a forked copy of the process."""
