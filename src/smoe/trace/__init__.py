"""Routing traces: what the routers chose in a run, as a file that NumPy reads and the simulator replays."""
