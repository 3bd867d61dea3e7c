"""The eviction policies: one file for each, and one line in the registry."""
