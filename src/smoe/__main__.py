"""`python -m smoe` is `smoe`."""

from __future__ import annotations

import os

from smoe.early_interrupt import leave_on_interrupt
from smoe.safe_path import drop_current_folder


def main() -> None:
    """The program."""
    drop_current_folder()
    os.environ["USE_HUB_KERNELS"] = "NO"  # read when transformers is imported: it downloads no code for any model
    leave_on_interrupt()  # where it was started in another way than by its name
    from smoe.cli import main as run

    run()


if __name__ == "__main__":
    main()
