"""Declarations of quantized formats, from which decoders and kernels are generated."""
