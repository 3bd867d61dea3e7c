"""Declares quantized formats. Decoders and kernels are generated from the declarations."""
