"""Routing traces: files with the routers' choices in a run, which NumPy reads and the simulator replays."""
