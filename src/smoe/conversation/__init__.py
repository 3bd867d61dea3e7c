"""Converts conversations to prompt tokens with the model's chat template, within limits of time and memory."""
