"""Routing traces: what the routers said in a run, as a file that NumPy reads and the simulator replays."""
