"""`python -m smoe` is `smoe`."""

from __future__ import annotations

import os
import signal

from smoe.safe_path import drop_current_folder


def main() -> None:
    """The program. Before it can answer a Ctrl-C in words, and when all has been said, it leaves without any."""
    drop_current_folder()
    os.environ["USE_HUB_KERNELS"] = "NO"  # read when transformers is imported: it downloads no code for any model
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from smoe.cli import main as run

    run()


if __name__ == "__main__":
    main()
