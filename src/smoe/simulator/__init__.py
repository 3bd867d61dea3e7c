"""The same plans on no hardware at all: hits, misses and times of a recorded routing."""
