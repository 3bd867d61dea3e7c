"""Decisions as pure functions: standard library and NumPy only, no torch, no files, no clock, no threads.

The engine carries the plans out with copies and kernels, the simulator on nothing.
"""
