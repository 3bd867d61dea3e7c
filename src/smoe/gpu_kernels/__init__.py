"""Triton kernels for GPUs. They compute a layer's experts directly from their slots, whose addresses are arguments."""
