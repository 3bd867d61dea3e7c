"""A cluster measured on one machine, with real processes in network namespaces over a shaped link.

    python -m bench.cluster speed MODEL [--cells 1xfinish,4xfinish,...] [--links 1gbit] [--out FILE.json]
    python -m bench.cluster forecast MODEL --runs FILE.jsonl [--links 100mbit,1gbit,unshaped] [--seconds 90]
    python -m bench.cluster hops [--sizes 8192,16384]
    python -m bench.cluster soak MODEL [--faults 200] [--seed 0]
    python -m bench.cluster memory [--python PYTHON]

All but the last need root and /dev/net/tun. Each mode prints a table and ends with one JSON line. Namespaces and
processes are gone afterwards, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from bench.cluster import forecast, hops, memory, soak, speed
from bench.cluster.child import ChildError
from bench.cluster.network import NetworkError, check

_MODES = {"speed": speed, "forecast": forecast, "hops": hops, "soak": soak, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True, metavar="{" + ",".join(_MODES) + "}")
    for name, mode in _MODES.items():
        of_mode = modes.add_parser(name, description=mode.__doc__)
        mode.options_of(of_mode)
        of_mode.add_argument("--out", type=Path, help="FILE.json; a table goes to FILE.txt")
        of_mode.set_defaults(run=mode.run, is_networked=getattr(mode, "IS_NETWORKED", True))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # what was measured of the model before is not known
        try:
            if options.is_networked:
                check()
            options.run(options)
        except (NetworkError, ChildError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)


if __name__ == "__main__":
    main()
