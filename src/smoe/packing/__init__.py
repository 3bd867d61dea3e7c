"""Writes packed copies of a model's experts: one file in which every expert is contiguous, in its own precision or in
fewer bits."""
