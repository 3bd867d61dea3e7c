"""What a release needs: one version. Would catch a wheel whose name is not what `smoe --version` prints, and a released
version without its section in the changelog.
"""

from __future__ import annotations

import re
from pathlib import Path

import smoe

ROOT = Path(__file__).parents[1]


def test_the_version_has_one_place() -> None:
    """The build backend reads it from the package."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf8")
    assert 'dynamic = ["version"]' in text and not re.search(r"^version\s*=", text, re.M)
    assert re.findall(r'^\[tool.hatch.version\]\npath = "(.*)"$', text, re.M) == ["src/smoe/__init__.py"]
    written = (ROOT / "src" / "smoe" / "__init__.py").read_text(encoding="utf8")
    assert re.findall(r'^__version__ = "(.*)"$', written, re.M) == [smoe.__version__]


def test_a_released_version_begins_the_changelog() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf8"), re.M)
    assert ".dev" in smoe.__version__ or headings[0] == smoe.__version__
