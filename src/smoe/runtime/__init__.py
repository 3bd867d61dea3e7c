"""Carrying decisions out: the engine, its layers' forward, and the seam to the model."""
