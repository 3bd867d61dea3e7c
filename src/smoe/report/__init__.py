"""What a run was, what one will be, and how far both are from the hardware's limits."""
