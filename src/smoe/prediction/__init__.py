"""Predictors of later layers' experts."""
