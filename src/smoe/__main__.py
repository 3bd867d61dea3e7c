"""The entry point of `python -m smoe`, which does the same as the command `smoe`."""

from __future__ import annotations

import atexit
import gc
import os

from smoe.early_interrupt import leave_on_interrupt
from smoe.safe_path import drop_current_folder


def main() -> None:
    """Run the command line."""
    drop_current_folder()
    atexit.register(gc.freeze)  # otherwise Python searches all objects for garbage when it ends: a second with torch
    os.environ["USE_HUB_KERNELS"] = "NO"  # transformers, which reads this when imported, then downloads no kernel code
    leave_on_interrupt()  # has an effect only if the program was not started by its name
    from smoe.garbage import collection_paused

    with collection_paused():
        from smoe.cli import main as run

    run()


if __name__ == "__main__":
    main()
