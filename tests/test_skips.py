"""Groups of skipped tests: each runs somewhere, and every reason in the sources is of one. Would catch a test that is
skipped everywhere, a page that misses a group, a place that is no command."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.skips import GROUPS, PLACES, group_of, summary

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tests.md"
TEST = """
import pytest
@pytest.mark.skipif(True, reason="needs a CUDA device")
@pytest.mark.parametrize("cell", range(9))
def test_on_a_gpu(cell): pass
def test_on_another_system():
    pytest.skip("no fork on this system")
def test_nowhere():
    pytest.skip("the moon is not full")
def test_everywhere(): pass
"""


@functools.cache
def reasons() -> dict[str, str]:
    """Of everything in the tests that skips, by file and line: the beginning of its reason."""
    return dict(_reasons())


def _reasons() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name == "test_skips.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf8"))):
            if isinstance(node, ast.Call) and (reason := reason_in(node)) is not None:
                yield f"{path.name}:{node.lineno}", reason


def reason_in(call: ast.Call) -> str | None:
    """None for what does not skip, and for a reason that is only made when the tests run."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if name not in ("skip", "skipif", "importorskip"):
        return None
    given = named.get("reason", call.args[0] if name == "skip" and call.args else None)
    if given is None and name == "importorskip" and isinstance(call.args[0], ast.Constant):
        return f"could not import {call.args[0].value!r}"
    if isinstance(given, ast.JoinedStr):
        given = given.values[0]
        return f"{given.value}AVX-512" if isinstance(given, ast.Constant) else None
    return str(given.value) if isinstance(given, ast.Constant) else None


def test_every_reason_is_of_a_group() -> None:
    assert len(reasons()) > 60
    assert not {place: reason for place, reason in reasons().items() if group_of(reason) is None}


def test_no_group_is_empty() -> None:
    """As nothing else skips for it, its line on the page would say what is not so."""
    made = ["needs qemu-aarch64", "not on this machine, where smoe leaves it to torch: machine code"]
    assert {group_of(reason) for reason in [*reasons().values(), *made]} == set(GROUPS)


def test_every_group_runs_somewhere() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf8"), re.MULTILINE)
    for group in GROUPS:
        assert group.place in PLACES, group
        assert set(re.findall(r"make ([\w-]+)", group.place)) & set(targets), group


def test_the_page_lists_the_groups() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE.read_text("utf8"), re.MULTILINE)
    assert [(group.needs, group.place) for group in GROUPS] == [row for row in rows if row[1] in PLACES]


def test_a_reason_of_no_group_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TEST)
    found = pytester.runpytest_inprocess("-p", "tests.skips", "-p", "no:cacheprovider", "-n0")
    found.assert_outcomes(passed=1, skipped=2, failed=1, deselected=8)
    found.stdout.fnmatch_lines(
        ["*no group of tests/skips.py*the moon is not full*", "*1  need an NVIDIA GPU; they run by `make gpu`*"]
    )


def test_skipped_tests_that_are_asked_for_fail(pytester: pytest.Pytester) -> None:
    """As `make test-optional` asks for them."""
    pytester.makepyfile(TEST)
    found = pytester.runpytest_inprocess("-p", "tests.skips", "-p", "no:cacheprovider", "-n0", "--none-needs", "GPU")
    found.assert_outcomes(passed=1, skipped=1, failed=1, errors=1, deselected=8)


def test_the_summary_counts_by_group() -> None:
    lines = summary(["no IPv6 here", "needs a CUDA device", "no fork on this system"])
    assert [line.split()[0] for line in lines] == ["2", "1"] and "CI" in lines[0] and "make gpu" in lines[1]
