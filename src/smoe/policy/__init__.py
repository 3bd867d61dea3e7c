"""All decisions, as pure functions that use the standard library and NumPy only: no torch, files, clock or threads.

The engine executes the decisions with loads and kernels. The simulator executes them without hardware.
"""
