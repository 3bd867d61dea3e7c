"""Packages that are installed as far as entry points go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, package: str, group: str, points: Mapping[str, str]) -> None:
    """Write what an installer would write into `folder`, which is on the path of modules."""
    place = folder / f"{package}-1.0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {value}" for name, value in points.items())
    (place / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")
