"""The papers' own settings, simulated: their figures compared with ours, as relative claims."""
