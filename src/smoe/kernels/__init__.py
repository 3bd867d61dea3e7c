"""Machine code, compiled on demand, for arithmetic that torch computes too slowly; torch is always the fallback."""
