"""docs/plug-ins.md, run as it is printed: its classes, its commands in their order, its programs, its package.

Would catch: a renamed method or attribute that plug-ins rely on, figures of the page that are no longer so.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smoe.policy.registry import EVICTIONS, ONLINE_EVICTION, PREDICTORS
from tests.cli.conftest import Ran, Run
from tests.toy import save_toy

PAGE = (Path(__file__).parents[2] / "docs" / "plug-ins.md").read_text(encoding="utf8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
COMMANDS = re.findall(r"^\$ smoe (.*)$", PAGE, re.M)
(PACKAGE,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.S | re.M)
LONG = ("eval", "verify")
"""Commands that take a small model in place of the embedded one, and `FEWER` tokens."""
FEWER = {"640": "64"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(tmp_path_factory.mktemp("small") / "model", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader would be: the classes in a file. Commands leave a trace there."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(PROGRAMS[0], encoding="utf8")
    return folder


@pytest.fixture
def read(folder: Path, small: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Ran]:
    """Runs a printed command in that folder."""
    monkeypatch.chdir(folder)

    def read(command: str) -> Ran:
        words = shlex.split(command)
        shorter = {"demo": str(small), **FEWER} if words[0] in LONG else {}
        ran = run(*(shorter.get(word, word) for word in words))
        assert ran.code == 0, (command, ran.err)
        return ran

    return read


def found(text: str, pattern: str) -> str:
    match = re.search(pattern, text, re.M)
    assert match is not None, pattern
    return match[1]


def number(figure: str) -> int:
    return int(figure.replace(",", ""))


def test_the_page_as_printed(read: Callable[[str], Ran], capsys: pytest.CaptureFixture[str]) -> None:
    shown = [read(command).out for command in COMMANDS]
    exec(compile(PROGRAMS[1], "the second program of the page", "exec"), {})
    misses = dict(line.split() for line in capsys.readouterr().out.splitlines())
    uses = number(found("".join(shown), r"^misses +\d+ of (\d+) uses"))
    uses_of_page = found(PAGE, r"The trace has ([\d,]+) expert uses")
    for name in (*ONLINE_EVICTION, "./mine.py:Fading"):
        printed = found(PAGE, rf"^\| `{name.rpartition(':')[2]}`.* \| ([\d,]+) \|$")
        share = number(printed) / number(uses_of_page)  # another CPU may write another, shorter text
        assert int(misses[name]) / uses == pytest.approx(share, rel=0.2), f"{name}, of which the page says {printed}"
    times = [float(time) for out in shown for time in re.findall(r"([\d.]+) ms a step", out)]
    assert times == pytest.approx([42.3, 45.1, 41.5, 41.0], rel=0.25)
    assert "bit equal" in shown[-1]


def test_the_last_program(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    exec(compile(PROGRAMS[2], "the third program of the page", "exec"), {})
    assert "fading" in capsys.readouterr().out


def test_the_package(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry points give names."""
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "__init__.py").touch()
    (tmp_path / "mypackage" / "policies.py").write_text(PROGRAMS[0], encoding="utf8")
    installed = tmp_path / "mypackage-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1.0\n")
    sections = re.sub(r'\[project\.entry-points\."(.*)"\]', r"[\1]", PACKAGE).replace('"', "")
    (installed / "entry_points.txt").write_text(sections)
    monkeypatch.syspath_prepend(tmp_path)
    assert EVICTIONS.find("fading").__module__ == PREDICTORS.find("pairs").__module__ == "mypackage.policies"
    for name in [name for name in sys.modules if name.startswith("mypackage")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("line", PROGRAMS[0].split("\n\n\nclass ")[1:], ids=lambda text: text.split("(")[0])
def test_a_class_is_short(line: str) -> None:
    assert len(line.strip().splitlines()) <= 36
