"""`smoe serve` as a whole process: what it costs, what it stands."""
