"""Formats of model output: reasoning, answers and tool calls, as each model family writes them."""
