"""Measurements of lossy settings: quality and time, token by token; and tuning."""
