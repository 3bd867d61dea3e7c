"""The memory hierarchy of experts: files, disk, host and device memory, the transfers between them, and slots."""
