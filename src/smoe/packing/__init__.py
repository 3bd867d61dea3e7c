"""Copies of a model's experts that we make: one file, every expert in one piece, as it is or in fewer bits."""
