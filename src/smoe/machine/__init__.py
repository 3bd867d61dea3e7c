"""Measurements of this machine: memory, disk, link and processor."""
