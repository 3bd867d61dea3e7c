"""Machine code for CPUs, compiled on demand, for arithmetic that torch computes too slowly. torch computes wherever a
kernel cannot be used."""
