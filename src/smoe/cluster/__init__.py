"""Several machines serve one model: the main machine, and workers that compute experts for it (OD-MoE)."""
