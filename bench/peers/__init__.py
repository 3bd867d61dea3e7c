"""Compare engines on one model, one forced token stream and one memory limit, in alternating fresh processes."""
