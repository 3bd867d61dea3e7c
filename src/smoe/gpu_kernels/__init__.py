"""Triton kernels for GPUs that compute a layer's experts directly from their slots, by address."""
