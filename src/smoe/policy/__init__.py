"""All decisions of the engine: which experts to load, evict, predict and compute, and where. They use the standard
library and NumPy only: no torch, files, clock or threads.

The engine executes the decisions with loads and kernels. The simulator executes them without hardware.
"""
