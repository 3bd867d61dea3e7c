"""The same plans on no hardware at all: cache statistics of a recorded routing."""
