"""All decisions, as pure functions: standard library and NumPy only, no torch, files, clock or threads.

The engine executes the plans with copies and kernels, the simulator without hardware.
"""
