"""Executes the engine's plans without hardware: hits, misses and times of a recorded routing."""
