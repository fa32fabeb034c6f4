"""Nothing that a replay does outlives the replay."""
