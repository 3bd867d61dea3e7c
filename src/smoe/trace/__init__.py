"""Routing traces: the routers' choices in a run, as a file that NumPy reads and the simulator replays."""
