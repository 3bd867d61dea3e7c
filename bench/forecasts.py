"""Forecast beside measurement: is what `smoe plan` says before a model is loaded what a run then does?

    python -m bench.forecasts MODEL ... --resident 13%,25%,50% [--presets exact,lru,smoe] [--precisions auto,int4]
        [--rounds 3] [--set NAME=VALUE ...] [--out FILE.json]

Every cell is a model, a size of the cache, a preset and a precision; what needs a pack or prices that are not there is
left out and named. All forecasts are made first, without running anything but the measurements that `smoe plan` makes;
then every cell is run in a fresh process, the cells one after the other and the rounds one after the other, so that a
drift of the machine falls on all. A run reads a prompt of as many tokens as the forecast's, decodes some forced tokens
of a text untimed and the rest timed, from an empty cache. Compared are the mean time per token and the time to the
first, medians over the rounds. The error is measured / forecast - 1. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from smoe import __version__
from smoe.cli.settings import settings_of
from smoe.errors import SmoeError
from smoe.machine.measure import describe_machine
from smoe.presets import configure
from smoe.report.forecast import foretell
from smoe.report.on_clock import PROMPT_TOKENS
from smoe.units import parse_share

WARM_TOKENS, TIMED_TOKENS, CONTEXT_TOKENS = 12, 32, 1024
TEXT = Path(__file__).parent / "text.txt"
BARS = {"median": 0.15, "worst": 0.35}
"""What the errors of the time per token are to stay within."""

_WORKER = """
import json, sys
import torch
from smoe import from_pretrained
from smoe.models.checkpoint import whole_checkpoint
asked = json.loads(sys.argv[1])
ids = whole_checkpoint(asked["model"], None).tokenizer()(asked["text"])["input_ids"]
count = asked["prompt"] + asked["warm"] + asked["timed"]
rows = torch.tensor([(ids * (count // len(ids) + 1))[:count]])
model = from_pretrained(asked["model"], **asked["switches"])
engine = model.offload
cache, seconds = engine.new_cache(1), []
with torch.no_grad():
    for n in [0, *range(asked["prompt"], count)]:
        if n == asked["prompt"] + asked["warm"]:
            before = engine.stats()
        started = engine.now()
        tokens = rows[:, : asked["prompt"]] if n == 0 else rows[:, n : n + 1]
        model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        seconds.append(engine.now() - started)
timed = seconds[1 + asked["warm"] :]
counted, layers = engine.stats() - before, len(engine.store.layers)
print(json.dumps({"ttft_seconds": seconds[0], "seconds_per_token": sum(timed) / len(timed),
    "hit_ratio": counted.hit_ratio, "arithmetic": engine.arithmetic, "pieces": {
    "load": counted.read_busy_seconds / max(1, counted.loads + counted.prefetches),
    "expert": counted.compute_seconds / counted.decode_uses,
    "layer": counted.dense_seconds / counted.forward_passes / layers,
    "deciding": counted.plan_seconds / counted.forward_passes / layers,
    "waiting": counted.wait_seconds / counted.forward_passes},
    "loads": (counted.loads + counted.prefetches) / counted.forward_passes}))
engine.close()
"""


class Cell(NamedTuple):
    """One run to foretell and to make."""

    model: str
    resident: float
    preset: str
    precision: str

    def switches(self, more: dict[str, Any]) -> dict[str, Any]:
        """Of `configure` and `from_pretrained`."""
        asked = {"preset": self.preset, "precision": self.precision, "resident_share": self.resident}
        return asked | {"context_tokens": CONTEXT_TOKENS} | more


def main() -> None:
    options = _parse()
    more = settings_of(options.set)
    rows = []
    for cell in _cells(options):
        row = cell._asdict() | _foretold(cell, more)
        print(f"{_name(cell)}  {row.get('left_out') or _figures(row['forecast'])}", flush=True)
        rows.append(row)
    to_run = [(row, Cell(*(row[name] for name in Cell._fields))) for row in rows if "forecast" in row]
    for _ in range(options.rounds):
        for row, cell in to_run:
            row.setdefault("rounds", []).append(_measured(cell, more))
    summary = summarised([row for row, _ in to_run])
    _print(rows, summary)
    about = {"smoe": __version__, "machine": describe_machine(), "bars": BARS}
    result = about | {"settings": more, "rows": rows, "errors": summary}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    print(json.dumps(result))


def summarised(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Put medians and errors into the rows; median and worst error of both times."""
    found = {}
    for name in ("seconds_per_token", "ttft_seconds"):
        for row in rows:
            row.setdefault("measured", {})[name] = median(run[name] for run in row["rounds"])
            row.setdefault("error", {})[name] = row["measured"][name] / row["forecast"][name] - 1
        errors = [abs(row["error"][name]) for row in rows]
        found[name] = {"median": median(errors), "worst": max(errors)} if errors else None
    return found


def _cells(options: argparse.Namespace) -> Iterator[Cell]:
    for model in options.models:
        for precision in options.precisions.split(","):
            for share in options.resident.split(","):
                for preset in options.presets.split(","):
                    yield Cell(model, parse_share(share), preset, precision)


def _foretold(cell: Cell, more: dict[str, Any]) -> dict[str, Any]:
    """The forecast, or why there is none."""
    try:
        expected = foretell(cell.model, configure(**cell.switches(more)))
    except SmoeError as error:
        return {"left_out": str(error)}
    if expected is None:
        return {"left_out": "no rate at which experts come in"}
    if expected.missing:
        return {"left_out": "; ".join(expected.missing)}
    run = expected.run
    return {
        "forecast": {
            "seconds_per_token": run.seconds_per_token,
            "ttft_seconds": run.ttft_seconds,
            "hit_ratio": run.hit_ratio,
            "bound_by": run.bound_by,
            "pieces": run.pieces,
        }
    }


def _measured(cell: Cell, more: dict[str, Any]) -> dict[str, float]:
    """One run in a process of its own."""
    asked = {
        "model": cell.model,
        "text": TEXT.read_text(encoding="utf8"),
        "prompt": PROMPT_TOKENS,
        "warm": WARM_TOKENS,
        "timed": TIMED_TOKENS,
        "switches": cell.switches(more),
    }
    ran = subprocess.run(
        [sys.executable, "-c", _WORKER, json.dumps(asked)], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise SystemExit(f"{_name(cell)}: {ran.stderr}")
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def _name(cell: Cell) -> str:
    return f"{Path(cell.model).name:<16} {cell.resident:>5.0%} {cell.preset:<12} {cell.precision:<5}"


def _figures(times: dict[str, Any]) -> str:
    return f"{1e3 * times['seconds_per_token']:>9.1f} ms {times['ttft_seconds']:>7.2f} s"


def _print(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    print("\nmodel             kept preset       bits    forecast: token, first   measured: token, first   errors")
    for row in rows:
        cell = Cell(*(row[name] for name in Cell._fields))
        if "left_out" in row:
            print(f"{_name(cell)}  left out: {row['left_out']}")
            continue
        errors = [row["error"][name] for name in ("seconds_per_token", "ttft_seconds")]
        told = "  ".join(f"{error:+.0%}" for error in errors)
        print(f"{_name(cell)}  {_figures(row['forecast'])}  {_figures(row['measured'])}   {told}")
    for name, errors in summary.items():
        if errors is not None:
            print(f"{name}: median error {errors['median']:.0%}, worst {errors['worst']:.0%}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--resident", default="13%,25%,50%", help="shares of the experts in memory")
    parser.add_argument("--presets", default="exact,lru,smoe")
    parser.add_argument("--precisions", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of every run and forecast")
    parser.add_argument("--out", type=Path, help="the result as a file, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
