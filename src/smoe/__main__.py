"""`python -m smoe` is `smoe`."""

from smoe.cli import main

if __name__ == "__main__":
    main()
