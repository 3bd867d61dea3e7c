"""Forecast beside measurement: is what `smoe plan` says before a model is loaded what a run then does?

    python -m bench.forecasts MODEL ... --resident 13%,25%,50% [--presets exact,lru,smoe] [--precisions auto,int4]
        [--rounds 3] [--set NAME=VALUE ...] [--out FILE.json]

An --out of the same cells that is there already goes on: rounds that it has are not run again.

Every cell is a model, a size of the cache, a preset and a precision; what needs a pack or prices that are not there is
left out and named. Every cell is foretold and then run in a fresh process, the cells one after the other and the rounds
one after the other, so that a drift of the machine falls on all. *Forecast* is made before the cell has run; *taught*
before its second round, by what one run of the model in this precision has shown (the first preset, the middle share),
as `smoe generate` teaches: the pieces' times, and how skewed the routing is. The user's cache is left alone, but for
`smoe doctor`'s profile, which is used. A run reads a prompt of as many tokens as the forecast's, decodes some forced
tokens of a text untimed, for as long as the engine tries whether prefetching pays, and the rest timed, from an empty
cache. Compared are the mean time per token and the time to the first, medians over the rounds. The error is
measured / forecast - 1. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from smoe.cli.settings import settings_of
from smoe.errors import SmoeError
from smoe.machine.measure import describe_machine, describe_versions, profile_path
from smoe.models.checkpoint import described_checkpoint
from smoe.policy.trial import TURN, TURNS
from smoe.presets import configure
from smoe.report.forecast import foretell
from smoe.report.pace import Access, Pace, RunArithmetic, remember
from smoe.report.usual_text import PROMPT_TOKENS
from smoe.units import parse_share
from smoe.user_cache import PLACE

WARM_TOKENS, TIMED_TOKENS, CONTEXT_TOKENS = TURN * TURNS, 24, 1024
"""A forecast is of a run that has found out whether prefetching pays; and a run teaches by `LEAST_STEPS` and more."""
TEXT = Path(__file__).parent / "text.txt"
BARS = {"median": 0.15, "worst": 0.35}
"""What the errors of the time per token are to stay within."""

_WORKER = """
import json, sys
import torch
from smoe import from_pretrained
from smoe.models.checkpoint import whole_checkpoint
from smoe.report.hindsight import shown_by
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
        if n == 0:
            prompt = engine.stats()
timed = seconds[1 + asked["warm"] :]
counted, layers = engine.stats() - before, len(engine.store.layers)
print(json.dumps({"ttft_seconds": seconds[0], "seconds_per_token": sum(timed) / len(timed),
    "hit_ratio": counted.hit_ratio, "prefetches": engine.executor.prefetching.is_on,
    "prefetched": counted.prefetches / counted.forward_passes,
    "prefetches_used": counted.prefetches_used / counted.forward_passes, "arithmetic": engine.arithmetic, "pieces": {
    "load": counted.read_busy_seconds / max(1, counted.loads + counted.prefetches),
    "expert": counted.compute_seconds / counted.decode_uses,
    "layer": counted.dense_seconds / counted.forward_passes / layers,
    "deciding": counted.plan_seconds / counted.forward_passes / layers,
    "waiting": counted.wait_seconds / counted.forward_passes},
    "pace": vars(shown_by(engine, counted, asked["prompt"])),
    "prompt_computing": prompt.compute_seconds + prompt.dense_seconds,
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
    rows: list[dict[str, Any]] = [cell._asdict() for cell in _cells(options)]
    done = _taken_up(rows, options.out, more)
    with _own_cache():
        for number in range(done, options.rounds):
            if number == 1:
                _teach(rows)
            for row in rows:
                _round(row, more, number)
            result = _result(rows, more)
            if options.out:  # what is there survives an interrupt of the next round
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    _print(rows, result["errors"])
    print(json.dumps(result))


def _taken_up(rows: list[dict[str, Any]], out: Path | None, more: dict[str, Any]) -> int:
    """How many rounds an earlier result at `out` has of the same cells, all of which are put into `rows`."""
    if out is None or not out.exists():
        return 0
    before = json.loads(out.read_text(encoding="utf8"))
    by_name = {_key(row): row for row in before["rows"]}
    if (
        set(by_name) != {_key(row) for row in rows}
        or before["settings"] != more
        or before["machine"] != describe_machine()
        or before["versions"] != describe_versions()
    ):
        raise SystemExit(f"{out} is of other cells, settings, versions or another machine; name another file")
    for row in rows:
        row |= by_name[_key(row)] | {"model": row["model"]}
    return min((len(row["rounds"]) for row in rows if "rounds" in row), default=0)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Of a cell, wherever its model lies."""
    return Path(row["model"]).name, row["resident"], row["preset"], row["precision"]


def _result(rows: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
    """What has been found so far."""
    told = [row for row in rows if "forecast" in row]
    errors = {name: summarised(told, name) for name in ("forecast", "taught") if all(name in row for row in told)}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    about = {"date": date, "machine": describe_machine(), "versions": describe_versions(), "bars": BARS}
    return about | {"settings": more, "rows": rows, "errors": errors}


@contextmanager
def _own_cache() -> Iterator[None]:
    """Inside, what runs teach is kept in a folder of ours; the machine's measured profile is there, too."""
    profile = profile_path()
    with TemporaryDirectory() as folder:
        if profile.exists():
            (Path(folder) / "smoe").mkdir()
            shutil.copy(profile, Path(folder) / "smoe")
        before = os.environ.get(PLACE)
        os.environ[PLACE] = folder
        try:
            yield
        finally:
            os.environ.pop(PLACE)
            if before is not None:
                os.environ[PLACE] = before


def _round(row: dict[str, Any], more: dict[str, Any], number: int) -> None:
    """Foretell a cell before its first two rounds, and run it."""
    cell = Cell(*(row[name] for name in Cell._fields))
    if number == 0:
        row |= _foretold(cell, more)
    elif number == 1 and "forecast" in row:
        row["taught"] = _foretold(cell, more)["forecast"]
    if "forecast" in row:
        row.setdefault("rounds", []).append(_measured(cell, more))
    told = row.get("left_out") or f"{_figures(row['forecast'])}  {_figures(row['rounds'][-1])}"
    print(f"{_name(cell)}  {told}", flush=True)


def _teach(rows: list[dict[str, Any]]) -> None:
    """Let the next forecasts know one run of each model and precision: the first preset's, with the middle share."""
    by_model: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "rounds" in row and row["preset"] == rows[0]["preset"]:
            by_model.setdefault((row["model"], row["precision"]), []).append(row)
    for (model, precision), of_model in by_model.items():
        row = of_model[len(of_model) // 2]
        run, place = row["rounds"][0], described_checkpoint(model, None).place
        pace = replace(Pace(**run["pace"]), prompt=run["prompt_computing"] / row["forecast"]["prompt_computing"])
        for access in Access:  # all runs read in the same way
            remember(place, RunArithmetic(precision), access, pace)


def summarised(rows: list[dict[str, Any]], told: str = "forecast") -> dict[str, Any]:
    """Put medians, and the errors of what was `told`, into the rows; median and worst error of both times."""
    found = {}
    for name in ("seconds_per_token", "ttft_seconds"):
        for row in rows:
            row.setdefault("measured", {})[name] = median(run[name] for run in row["rounds"])
            error = row["measured"][name] / row[told][name] - 1
            row.setdefault("error", {}).setdefault(told, {})[name] = error
        errors = [abs(row["error"][told][name]) for row in rows]
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
            "prompt_computing": run.prefill_parts["computing"],
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
    print(
        "\nmodel             kept preset       bits    forecast: token, first   measured: token, first   errors; taught"
    )
    for row in rows:
        cell = Cell(*(row[name] for name in Cell._fields))
        if "left_out" in row:
            print(f"{_name(cell)}  left out: {row['left_out']}")
            continue
        told = "; ".join(
            "  ".join(f"{error:+.0%}" for error in row["error"][name].values()) for name in summary if name in row
        )
        print(f"{_name(cell)}  {_figures(row['forecast'])}  {_figures(row['measured'])}   {told}")
    for told, of in summary.items():
        for name, errors in of.items():
            if errors is not None:
                print(f"{told}, {name}: median error {errors['median']:.0%}, worst {errors['worst']:.0%}")


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
