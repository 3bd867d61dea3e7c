"""What a release needs: one version everywhere. Would catch a wheel whose name is not what `smoe --version` prints."""

from __future__ import annotations

import re
from pathlib import Path

import smoe

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf8")
    assert re.findall(r'^version = "(.*)"$', text, re.M) == [smoe.__version__]
    released = smoe.__version__.partition(".dev")[0]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf8"), re.M)
    assert smoe.__version__ != released or headings[0] == released
