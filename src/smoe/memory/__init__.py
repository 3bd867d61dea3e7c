"""The memory hierarchy: files, disk, host and device; what reads, what copies, where experts lie, how long it takes."""
