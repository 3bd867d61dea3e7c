"""Write packed copies of a model's experts: one file with every expert contiguous, in its own precision or in fewer
bits."""
