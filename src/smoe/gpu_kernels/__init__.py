"""Kernels for GPUs, in Triton: the experts of a layer straight from their slots, by address."""
