"""The memory hierarchy: disk, host, device. One file a level, the same verbs on every one."""
