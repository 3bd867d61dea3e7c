"""The sample output of README.md against a run of its command. Would catch lines that a run no longer prints."""

from __future__ import annotations

import re
from pathlib import Path

from smoe.kernels.many_rows import instruction_set
from tests.cli.conftest import Run

README = Path(__file__).parents[2] / "README.md"
PROMPT = "Once upon a time there was a little girl named Lily."
DEPENDENT = ("busy machine", "forecast", "arithmetic")
"""Lines that depend on other programs, on earlier runs and on the CPU."""
SLOTS = re.compile(r"\d+( of 768)?(?= experts| until)|\(\d+%\)")
"""The numbers of experts in the line about the budget."""


def lines_of(text: str) -> dict[str, str]:
    """{name of a line of a summary: its shape, with one sign for every figure and its unit}, in their order."""
    found = re.findall(r"^([a-z][a-z ]{0,14}[a-z]) {2,}(\S.*)$", text, re.MULTILINE)
    return {
        name: re.sub(r"(\d[\d.,]*\d|\d)( ([KMGT]?i?B|s|ms|us|µs)\b)?", "#", value)
        for name, value in found
        if name not in DEPENDENT
    }


def test_the_sample_has_the_shape_of_a_run(run: Run) -> None:
    sample = README.read_text("utf8").partition("`make demo` ends with output like this:\n\n```text\n")[2]
    sample = sample.partition("```")[0]
    ran = run("generate", "demo", "--memory", "20MiB", "--max-new-tokens", 120, "--prompt", PROMPT)
    assert ran.code == 0
    expected, found = lines_of(sample), lines_of(ran.err)
    assert list(found) == list(expected) and "hardware limit" in found
    for name in found.keys() - {
        "time went to",
        "hardware limit",
    }:  # the order and the slowest part depend on the machine
        assert found[name] == expected[name], name
    part = re.compile(r"the (disk|memory|link) takes|\(a quick.*\)|\(profile.*\)|, disk as this run read it")
    assert part.sub("", found["hardware limit"]) == part.sub("", expected["hardware limit"])
    (budget,) = (line for line in sample.splitlines() if line.startswith("budget"))
    (ours,) = (line for line in ran.err.splitlines() if line.startswith("budget"))
    if instruction_set() is None:
        assert ours == budget, "the division of a budget is the same on every CPU without memory for packed rows"
    else:
        assert SLOTS.sub("#", ours) == SLOTS.sub("#", budget), "packed rows take memory from the experts"
