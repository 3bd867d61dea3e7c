"""Skipped tests: in groups by what is missing, each with the place where its tests run.

A test that is skipped for a reason of no group fails: it would run nowhere. Of a test whose marks skip it, one cell is
kept, which shows the reason; the others can never apply on this machine. `docs/tests.md` lists the groups.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator
from typing import Any, NamedTuple

import pytest

CI = "`make test-all` in CI: Linux, x86-64 with AVX2, no GPU"
BF16_CPU = (
    "`make test-all` on a CPU with AVX-512 BF16; on the reference CPU (Zen 5) such a test fails instead of being "
    "skipped"
)
ANY_CPU = "`make test-all` on a CPU that has it; NEON also by `make test-optional`, emulated"
GPU = "`make gpu` on a machine with an NVIDIA GPU"
OPTIONAL = "`make test-optional`"
REAL = "`make test-real` with a network"
PLACES = (CI, BF16_CPU, ANY_CPU, GPU, OPTIONAL, REAL)


class Group(NamedTuple):
    """Skipped tests that need the same."""

    needs: str
    """What they need, which is missing here."""
    reasons: str
    """A pattern that all their reasons match from the beginning on."""
    place: str
    """Where they run: one of `PLACES`."""


GROUPS = (
    Group("an NVIDIA GPU", "needs a CUDA device", GPU),
    Group("no GPU", "there is a GPU|needs experts in host memory|programs would wait for what never comes", CI),
    Group(
        "kernels of smoe that add numbers in torch's order",
        "not on this machine, where smoe leaves it to torch|this CPU has no bf16 dot products|torch sums bf16 products "
        "in another order|this CPU has no products in the library's order|no kernel|this CPU's library sums",
        BF16_CPU,
    ),
    Group("an instruction set", "this CPU has no (AVX|NEON)", ANY_CPU),
    Group(
        "our kernels: llvmlite, and AVX2 on x86-64",
        "needs llvmlite|this CPU has no instruction set that kernels are for|no oneDNN|Triton is not installed",
        CI,
    ),
    Group("aarch64, emulated", "needs qemu-aarch64|needs an LLVM that knows aarch64", OPTIONAL),
    Group("a Chromium", "no Chromium on this machine", OPTIONAL),
    Group("Ray or lm_eval", "could not import '(ray|lm_eval)'", OPTIONAL),
    Group(
        "a client of the server: a package of Python",
        "could not import '(anthropic|instructor|langchain\\w*(\\.messages)?|litellm|ollama|pydantic_ai)'"
        "|SMOE_(LLAMA_INDEX|OPEN_WEBUI) names no",
        OPTIONAL,
    ),
    Group("clients and agents of npm", "SMOE_NPM names no", OPTIONAL),
    Group("aider", "SMOE_AIDER names no", OPTIONAL),
    Group("systemd", "systemd is not installed", OPTIONAL),
    Group("the sources of llama.cpp", "SMOE_LLAMA_CPP names no", OPTIONAL),
    Group("artifacts of package registries", "SMOE_REAL names no|no package registry provides", REAL),
    Group(
        "Linux on x86-64, or POSIX",
        "needs Linux|code is brought into a process on|x86-64 Linux only|extensions of x86|other systems are played on"
        "|POSIX|signals of POSIX|Linux shows|only Linux|huge pages on request|no device that is always full|no fork"
        "|cases run in forked|psutil asks for more rights|the system does not say|this system|Windows has no|no IPv6"
        "|could not import 'fcntl'|the C library is not glibc|the page cache is examined on Linux"
        "|processes are forked|results are stored where files|this file system refuses direct reads",
        CI,
    ),
    Group("curl or node", "needs (curl|node)", CI),
    Group("git, and the repository's history", "needs the repository's history", CI),
    Group("the development requirements, Python 3.11", "could not import|(needs )?Python 3.11", CI),
    Group(
        "the embedded model, and every package", "its weights are not in|the embedded model is not|no command line", CI
    ),
)


def group_of(reason: str) -> Group | None:
    """The first group with this reason."""
    return next((group for group in GROUPS if re.match(group.reasons, reason)), None)


def reason_of(report: Any) -> str:
    """Why a skipped test, or file of tests, was skipped."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--none-needs",
        action="append",
        default=[],
        metavar="WORD",
        help="tests that are skipped as they need this fail: a word of a group in tests/skips.py (several times)",
    )


def _checked(report: Any, config: pytest.Config) -> Any:
    """The report, as a failure where it was skipped for a reason of no group, or of one that must run."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = reason_of(report)
    group, words = group_of(reason), config.getoption("none_needs")
    if group is None:
        wrong = "is in no group of tests/skips.py. State there, and in docs/tests.md, where such tests run."
    elif any(word in group.needs for word in words):
        wrong = f"must not be: they need {group.needs}, and here they must run."
    else:
        return report
    report.longrepr, report.outcome = f"skipped, and this reason {wrong} {reason!r}", "failed"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    return _checked((yield), item.config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    return _checked((yield), collector.config)


def _reason_in_marks(item: pytest.Item) -> str | None:
    for mark in item.iter_markers():
        if mark.name == "skip" or (mark.name == "skipif" and any(mark.args)):
            return str(mark.kwargs.get("reason", ""))
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cells of one test that are skipped for one reason, the first."""
    seen, kept, others = set[tuple[str, str | None]](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        reason = _reason_in_marks(item)
        cell = item.nodeid.partition("[")[0], reason
        (others if reason is not None and cell in seen else kept).append(item)
        seen.add(cell)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = kept


def summary(reasons: list[str]) -> list[str]:
    """A line for each group, most tests first."""
    counts = Counter(group_of(reason) for reason in reasons)
    return [
        f"{count:5d}  need {group.needs}; they run by {group.place}" for group, count in counts.most_common() if group
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = [reason_of(report) for report in terminalreporter.stats.get("skipped", [])]
    if reasons:
        terminalreporter.section("skipped here")
        for line in summary(reasons):
            terminalreporter.line(line)
