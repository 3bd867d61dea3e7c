"""Guessing the experts of layers to come."""
