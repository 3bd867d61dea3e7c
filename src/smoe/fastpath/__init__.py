"""Replacements for modules of transformers by our kernels, where these have torch's bits."""
