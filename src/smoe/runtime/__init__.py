"""Executes plans: the engine, the computation of its layers' experts, and the connection to the transformers model."""
