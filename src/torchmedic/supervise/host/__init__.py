"""The host: cgroups, memory pressure, the memory guard, the post-mortem of a process."""
