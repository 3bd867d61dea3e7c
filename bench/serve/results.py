"""A result as it is written: with its circumstances, as one JSON line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


def write(bench: str, options: argparse.Namespace, names: Sequence[str], outcome: dict[str, Any]) -> None:
    """To stdout, and into `options.out` where there is one. `names`: the options that are told."""
    from smoe.machine.measure import describe_machine, describe_versions

    found = {
        "bench": bench,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "asked": {"model": Path(options.model).name, **{name: getattr(options, name) for name in names}},
        **outcome,
    }
    print(json.dumps(found))
    if options.out is not None:
        options.out.write_text(json.dumps(found) + "\n")
