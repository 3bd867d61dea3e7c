"""The papers' own settings, simulated: their figures beside ours, as relative claims."""
