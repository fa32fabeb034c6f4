"""The collectives that this process calls: a ring of our own, and torch's Flight Recorder."""
