"""Predictors of the experts that later layers will choose."""
