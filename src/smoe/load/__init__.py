"""Loads a model: from a folder or hub id to a transformers model with an engine."""
