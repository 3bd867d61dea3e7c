"""Computes experts on each kind of device: on the CPU, on a GPU, or on the CPU in parallel with a GPU."""
