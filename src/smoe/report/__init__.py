"""The summary of a run, forecasts of runs, and comparisons with the hardware's limits and the library's results."""
