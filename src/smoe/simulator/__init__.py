"""Executes the engine's plans without hardware, and returns the hits, misses and times for a recorded routing."""
