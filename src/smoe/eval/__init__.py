"""Measures the quality and time of lossy settings token by token, and tunes settings for a model."""
