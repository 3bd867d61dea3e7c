"""Measures this machine: memory, disk, link and processor."""
