"""Runs one model on several machines: a coordinator, and workers that compute experts for it (OD-MoE)."""
