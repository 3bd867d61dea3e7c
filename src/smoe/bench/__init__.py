"""`smoe bench`: the papers' cells on the user's own machine and model."""
