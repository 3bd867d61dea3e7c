"""The measurements of `smoe bench`."""
