"""Carrying plans out: the engine, its layers' forward, the KV cache, generation."""
