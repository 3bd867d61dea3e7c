"""What a benchmark of the cluster leaves: a table for people, and one JSON line with its circumstances."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from smoe.machine.measure import describe_machine, describe_versions


def spread(values: Sequence[float]) -> dict[str, float]:
    """Over rounds."""
    return {"median": float(median(values)), "least": float(min(values)), "most": float(max(values))}


def write(options: argparse.Namespace, found: dict[str, Any], table: str) -> None:
    """Print both; with `--out FILE.json` also into it and into FILE.txt beside it."""
    asked = {
        name: each.name if isinstance(each, Path) else each
        for name, each in vars(options).items()
        if name != "out" and not callable(each)
    }
    whole = {
        "bench": "cluster",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "asked": asked,
    } | found
    text = json.dumps(whole, default=str)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf8")
        options.out.with_suffix(".txt").write_text(table, encoding="utf8")
    print(table)
    print(text)
