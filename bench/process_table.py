"""What the process of each command holds at its peak: the table of `docs/metrics.md`, made or checked.

    python -m bench.process_table [--write]

Every command runs in a process of its own, on the embedded model, and says what it held most (`VmHWM`). *Libraries* is
what a process holds that has imported the third-party packages of the command and done nothing with them; *ours* is the
rest outside the budget: our modules, kernels, the code of the libraries that computing brings in, and what they keep.
*Files* are the pages of program files in a peak: they can be dropped and read again, and the system maps up to twice as
many of them while the files are new. `--write` puts the table into the page. Linux alone. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.serve.server import Server, running
from smoe.units import parse_bytes

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = (
    "| command | libraries, MiB | of it files, MiB | ours, MiB | budget, MiB | peak, MiB | of it files, MiB |\n"
    "| --- | --- | --- | --- | --- | --- | --- |\n"
)
_MIB = 2**20
_SHELL = ("typer", "rich.console", "pydantic", "numpy", "psutil")
_TORCH = ("torch", "torch.fx.experimental.symbolic_shapes")  # the second one brings sympy, which meta tensors need
_MODEL = (*_SHELL, *_TORCH, "transformers.models.qwen2_moe.modeling_qwen2_moe", "tokenizers", "safetensors")
_SERVER = (*_MODEL, "fastapi", "uvicorn", "prometheus_client", "jinja2")
_PEAK = """
import sys

def say():
    for line in open("/proc/self/status"):
        if line.startswith(("VmHWM:", "RssFile:")):
            print("held", *line.split()[:2], file=sys.stderr)
"""
_COMMAND = """
import atexit, sys
atexit.register(say)
sys.argv[0] = "smoe"
from smoe.cli import main
main()
"""


class Row(NamedTuple):
    """A command, and the packages that it loads."""

    line: str
    libraries: tuple[str, ...]

    @property
    def budget_bytes(self) -> int:
        """Of memory that the command itself holds: a plan holds none."""
        words = self.line.split()
        return 0 if words[1] == "plan" else parse_bytes(words[words.index("--memory") + 1], "memory")


ROWS = (
    Row("smoe plan demo --memory 20MiB", _SHELL),
    Row("smoe generate demo --memory 20MiB", _MODEL),
    Row("smoe generate demo --memory 48MiB", _MODEL),
    Row("smoe serve demo --memory 60MiB", _SERVER),
)


class Measured(NamedTuple):
    """MiB of one command."""

    libraries: float
    library_files: float
    ours: float
    budget: float
    peak: float
    files: float


class Held(NamedTuple):
    """MiB of one process."""

    peak: float
    files: float


def measure() -> dict[str, Measured]:
    """By command line."""
    with tempfile.TemporaryDirectory() as folder:  # nothing that other runs have stored
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        found = peaks(environment)
        libraries = baselines(environment)
    return {row.line: _divided(row, found[row.line], libraries[row.line]) for row in ROWS}


def peaks(environment: Mapping[str, str]) -> dict[str, Held]:
    """By command line."""
    for row in {row.line.split()[1]: row for row in ROWS}.values():
        peak(row, environment)  # compiles modules: a process that does this holds up to 100 MiB more
    return {row.line: peak(row, environment) for row in ROWS}


def baselines(environment: Mapping[str, str]) -> dict[str, Held]:
    """Measure processes that import the packages of each command and end, by command line."""
    held = {names: _imports(names, environment) for names in {row.libraries for row in ROWS}}
    return {row.line: held[row.libraries] for row in ROWS}


def _divided(row: Row, held: Held, libraries: Held) -> Measured:
    budget = row.budget_bytes / _MIB
    return Measured(*libraries, held.peak - libraries.peak - budget, budget, *held)


def _imports(names: Sequence[str], environment: Mapping[str, str]) -> Held:
    lines = "".join(f"import {name}\n" for name in ("smoe", *names))  # smoe first: it sets how threads wait
    if any(name.startswith("transformers") for name in names):
        lines = f"from smoe.cli.without_compiler import leave_out_compiler\nleave_out_compiler()\n{lines}"
    return _run([sys.executable, "-c", f"{_PEAK}{lines}say()"], environment)


def peak(row: Row, environment: Mapping[str, str]) -> Held:
    words = row.line.split()[1:]
    if words[0] == "serve":
        with running(words[1], 4, words[2:]) as process:
            Server(process.port, None).ask("Once upon a time", 40)
            return _held(Path(f"/proc/{process.pid}/status").read_text(encoding="ascii"))
    more = ["-p", "Once upon a time", "--max-new-tokens", "40"] if words[0] == "generate" else []
    return _run([sys.executable, "-c", _PEAK + _COMMAND, *words, *more], environment)


def _run(line: list[str], environment: Mapping[str, str]) -> Held:
    done = subprocess.run(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines = [text.removeprefix("held ") for text in done.stderr.splitlines() if text.startswith("held ")]
    if done.returncode or not lines:
        raise SystemExit(f"{line[-1]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return _held("\n".join(lines))


def _held(status: str) -> Held:
    """From lines of /proc/PID/status."""
    fields = dict(line.split(":", 1) for line in status.splitlines())
    peak, files = (int(fields[name].split()[0]) / 1024 for name in ("VmHWM", "RssFile"))
    return Held(peak, files)


def table(found: Mapping[str, Measured]) -> str:
    """In Markdown."""
    return HEAD + "".join(
        f"| `{line}` | {' | '.join(f'{number:.0f}' for number in measured)} |\n" for line, measured in found.items()
    )


def written(page: str) -> dict[str, Measured]:
    """What the page says."""
    lines = page.partition(HEAD)[2].partition("\n\n")[0].splitlines()
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {command.strip("`"): Measured(*map(float, numbers)) for command, *numbers in cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    asked = parser.parse_args()
    found = measure()
    print(table(found), file=sys.stderr)
    if asked.write:
        page = PAGE.read_text(encoding="utf8")
        before, _, after = page.partition(HEAD)
        PAGE.write_text(before + table(found) + "\n" + after.partition("\n\n")[2], encoding="utf8")
    print(json.dumps({"bench": "process_table", "mib": {line: each._asdict() for line, each in found.items()}}))


if __name__ == "__main__":
    main()
