"""Replaces the forward functions of transformers' modules by our kernels, after a test on the loaded model."""
