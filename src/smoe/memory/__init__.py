"""The memory hierarchy: files, disk, host and device memory, transfers between them, and expert slots."""
