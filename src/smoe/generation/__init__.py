"""Generates text from prompts."""
