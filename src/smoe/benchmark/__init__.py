"""What `smoe bench` measures."""
