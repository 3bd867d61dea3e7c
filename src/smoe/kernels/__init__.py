"""Arithmetic that torch does not do fast enough, compiled when it is needed; torch is always the fallback."""
