"""The memory hierarchy: files, disk, host and device; what reads, what copies, where experts lie, and the time it takes."""
