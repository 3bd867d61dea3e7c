"""The summary of a run, forecasts of runs (`smoe plan`), and comparisons with the library's results (`smoe verify`)."""
