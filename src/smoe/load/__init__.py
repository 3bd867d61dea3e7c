"""From a folder or hub id to a model with an engine behind it."""
