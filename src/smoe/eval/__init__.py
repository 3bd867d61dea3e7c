"""What a lossy option costs: quality and time, measured token by token."""
