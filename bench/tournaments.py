"""Does a tournament pick well? Its winners beside everybody else, all of them run, on text that it has not seen.

    python -m bench.tournaments MODEL --resident 13%,25%,50% --text MINE.txt [--judge OTHER.txt] [--rounds 3]
        [--tokens 96] [--set NAME=VALUE ...] [--out FILE.json]

For every size of the cache `smoe tune --prefetch auto --eviction auto` is run as a user would run it, on the first
text. Then every entrant is run on the second one, each in a fresh process, from an empty cache: some forced tokens
untimed, the rest timed. Evictions run without prefetch, predictors beside the eviction that won, and `default` is what
serves where no tournament was held. The order turns round with every round, so that a drift of the machine falls on
all. Of each run the mean time per token counts, of an entrant the median over the rounds.

The winner's time over the best entrant's is to stay within the bar. The best of many looks better than it is by what
runs differ anyway; how much that is, one setting says that runs twice: the eviction that won, once among the evictions
and once as `none` among the predictors.

What was learned of the model before (`smoe tune --predictor`, `--eviction learned --cache`) takes part; the user's own
winners are neither asked nor changed. Prints a table, which with --out goes to FILE.txt, too, and ends with one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from smoe.units import parse_share

WARM_TOKENS, CONTEXT_TOKENS = 32, 1024
TEXT = Path(__file__).parent / "text.txt"
BAR = 1.03
"""The winner's time over that of the best entrant, at most."""
KINDS = ("eviction", "prefetch")
DEFAULT = "default"
"""The kind and the name of what serves without a tournament."""

_WORKER = """
import json, sys
from pathlib import Path
import torch
from smoe import from_pretrained
from smoe.eval.texts import read_documents
from smoe.generation.teacher_forcing import forced
from smoe.models.checkpoint import whole_checkpoint
asked = json.loads(sys.argv[1])
tokenizer, warm = whole_checkpoint(asked["model"], None).tokenizer(), asked["warm"]
ids = [token for text in read_documents(Path(asked["text"])) for token in tokenizer(text)["input_ids"]]
if len(ids) < warm + asked["timed"]:
    raise SystemExit(f"the text has {len(ids)} tokens, {warm + asked['timed']} are needed")
model = from_pretrained(asked["model"], **asked["switches"])
engine, seconds = model.offload, []
engine.wait_ready()
with torch.no_grad():
    for _, took in forced(model, ids[: warm + asked["timed"]], engine.new_cache()):
        seconds.append(took)
        if len(seconds) == warm:
            before = engine.stats()
stats = engine.stats() - before
print(json.dumps({"seconds": [round(each, 7) for each in seconds[warm:]], "hit_ratio": stats.hit_ratio,
    "bytes_per_token": stats.bytes_read / asked["timed"], "resident_share": engine.ledger.resident_share,
    "eviction": engine.config.eviction, "prefetch": engine.config.prefetch}))
engine.close()
"""


class Runner(NamedTuple):
    """Somebody to run."""

    kind: str
    """One of `KINDS`, or `DEFAULT`."""
    name: str
    switches: dict[str, Any]
    """Of `from_pretrained`."""
    simulated_seconds: float | None
    """A token, by the tournament."""
    is_finalist: bool


class Verdict(NamedTuple):
    """Of one kind of entrants."""

    winner: str
    best: str
    """Of all as they were run."""
    ratio: float
    """The winner's time over the best's, medians."""
    least: float
    """Of the rounds."""
    most: float

    @property
    def is_within(self) -> bool:
        return self.ratio <= BAR


def main() -> None:
    options = _parse()
    if options.text.resolve() == options.judge.resolve():
        raise SystemExit("--text and --judge are one file: the tournament is to be judged on another text")
    shares, lines = [], list[str]()
    with tempfile.TemporaryDirectory() as folder:
        environment = _without_winners(Path(folder))
        for share in map(parse_share, options.resident.split(",")):
            shares.append(_one_size(options, share, environment))
            shutil.rmtree(Path(folder) / "smoe" / "winners", ignore_errors=True)
            lines += [*table(shares[-1]), ""]
            print("\n".join([*table(shares[-1]), ""]), flush=True)
    _finish(options, shares, lines)


def runners_of(found: Mapping[str, Any]) -> list[Runner]:
    """Everybody that a tournament (the command's JSON) had, and what serves without one."""
    won = found["eviction"]["entrants"][0]["name"]
    runners = []
    for kind in KINDS:
        for entrant in found[kind]["entrants"]:
            asked = {"eviction": won, "prefetch": "none"} | {kind: entrant["name"], "prefetch_trial": False}
            is_finalist = bool(entrant["measured_seconds"])
            runners.append(Runner(kind, entrant["name"], asked, entrant["simulated_seconds"], is_finalist))
    return [*runners, Runner(DEFAULT, DEFAULT, {"eviction": "auto", "prefetch": "auto"}, None, False)]


def in_order(runners: Sequence[Runner], number: int) -> list[Runner]:
    """Who runs when in a round: forwards, backwards, forwards."""
    return list(runners) if number % 2 == 0 else list(reversed(runners))


def judged(rows: Iterable[Mapping[str, Any]], winner: str) -> Verdict:
    """Of the rows of one kind: `name`, `rounds` (seconds a token of each)."""
    times = {row["name"]: row["rounds"] for row in rows}
    best = min(times, key=lambda name: median(times[name]))
    ratios = [one / other for one, other in zip(times[winner], times[best], strict=True)]
    return Verdict(winner, best, median(times[winner]) / median(times[best]), min(ratios), max(ratios))


def summarised(rows: Sequence[Mapping[str, Any]], winners: Mapping[str, str]) -> dict[str, Any]:
    """The verdicts by kind; both winners together beside the baselines; what the same setting differs by, run twice."""
    times = {(row["kind"], row["name"]): median(row["rounds"]) for row in rows}
    verdicts = {kind: judged([row for row in rows if row["kind"] == kind], winners[kind]) for kind in KINDS}
    together = times["prefetch", winners["prefetch"]]
    baselines = {
        "lru": times["eviction", "lru"],
        "auto": times["eviction", "auto"],
        DEFAULT: times[DEFAULT, DEFAULT],
    }
    one, other = times["eviction", winners["eviction"]], times["prefetch", "none"]
    strongest = min(baselines, key=lambda name: baselines[name])
    return {
        "verdicts": {kind: verdict._asdict() | {"is_within": verdict.is_within} for kind, verdict in verdicts.items()},
        "together_seconds": together,
        "beside_baselines": {name: together / seconds for name, seconds in baselines.items()},
        "strongest_baseline": strongest,
        "same_setting_twice": max(one, other) / min(one, other),
    }


def table(size: Mapping[str, Any]) -> list[str]:
    """A size of the cache, in lines."""
    lines = [
        f"{size['resident_share']:.0%} of the experts resident",
        f"{'ms a token':<32}{'simulated':>10}{'measured':>10}{'least .. most':>20}{'beside best':>13}{'hits':>8}",
    ]
    least = {
        kind: min(median(row["rounds"]) for row in size["entrants"] if row["kind"] == kind)
        for kind in (*KINDS, DEFAULT)
    }
    for row in size["entrants"]:
        middle, simulated = median(row["rounds"]), row["simulated_seconds"]
        won = row["name"] == size["winners"].get(row["kind"])
        lines.append(
            f"{row['kind']:<10}{row['name'] + (' (won)' if won else ' *' if row['is_finalist'] else ''):<22}"
            f"{'' if simulated is None else f'{1e3 * simulated:.2f}':>10}{1e3 * middle:>10.2f}"
            f"{1e3 * min(row['rounds']):>9.2f} .. {1e3 * max(row['rounds']):>7.2f}"
            f"{middle / least[row['kind']]:>13.3f}{row['hit_ratio']:>8.3f}"
        )
    found = size["summary"]
    for kind, verdict in found["verdicts"].items():
        lines.append(
            f"{kind}: the winner {verdict['winner']} takes {verdict['ratio']:.3f} times what the best takes, "
            f"{verdict['best']} (rounds {verdict['least']:.3f} .. {verdict['most']:.3f}): "
            f"{'within' if verdict['is_within'] else 'BEYOND'} {BAR:g}"
        )
    beside = ", ".join(f"{name} {ratio:.3f}" for name, ratio in found["beside_baselines"].items())
    lines.append(
        f"both winners together: {1e3 * found['together_seconds']:.2f} ms a token; beside the baselines: {beside}; the "
        f"strongest is {found['strongest_baseline']}"
    )
    lines.append(f"the same setting run twice differs by a factor of {found['same_setting_twice']:.3f}")
    return [*lines, "* was in the finals"]


def _one_size(options: argparse.Namespace, share: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Hold the tournament, then run everybody."""
    found = _tournament(options, share, environment)
    shutil.rmtree(Path(environment[_place()]) / "smoe" / "winners", ignore_errors=True)
    runners = runners_of(found)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {(each.kind, each.name): [] for each in runners}
    for number in range(options.rounds):
        for each in in_order(runners, number):
            run = _run(options, share, each, environment)
            runs[each.kind, each.name].append(run)
            print(
                f"round {number + 1}  {each.kind:<9} {each.name:<18} {1e3 * mean(run['seconds']):8.2f} ms",
                file=sys.stderr,
                flush=True,
            )
    rows = [
        each._asdict()
        | {
            "rounds": [mean(run["seconds"]) for run in runs[each.kind, each.name]],
            "hit_ratio": mean(run["hit_ratio"] for run in runs[each.kind, each.name]),
            "runs": runs[each.kind, each.name],
        }
        for each in runners
    ]
    winners = {kind: found[kind]["entrants"][0]["name"] for kind in KINDS}
    return {
        "resident_share": share,
        "winners": winners,
        "summary": summarised(rows, winners),
        "tournament": found,
        "entrants": rows,
    }


def _tournament(options: argparse.Namespace, share: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the command says."""
    command = [sys.executable, "-m", "smoe", "tune", options.model, "--resident", f"{100 * share:g}%"]
    command += ["--context", str(CONTEXT_TOKENS), "--prefetch", "auto", "--eviction", "auto"]
    command += ["--text", str(options.text), "--json"]
    command += [part for entry in options.set for part in ("--set", entry)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"the tournament failed:\n{ended.stderr}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _run(options: argparse.Namespace, share: float, runner: Runner, environment: Mapping[str, str]) -> dict[str, Any]:
    """One process."""
    from smoe.cli.settings import settings_of

    size = {"resident_share": share, "context_tokens": CONTEXT_TOKENS}
    asked = {
        "model": options.model,
        "text": str(options.judge),
        "warm": WARM_TOKENS,
        "timed": options.tokens,
        "switches": size | settings_of(options.set) | runner.switches,
    }
    command = [sys.executable, "-c", _WORKER, json.dumps(asked)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{runner.kind} {runner.name} failed:\n{ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _place() -> str:
    from smoe.user_cache import PLACE

    return PLACE


def _without_winners(folder: Path) -> dict[str, str]:
    """The environment, with a copy of the user's cache in which nobody has won yet."""
    from huggingface_hub.constants import HF_HOME

    from smoe.user_cache import cache_folder

    if cache_folder().exists():
        shutil.copytree(cache_folder(), folder / "smoe", ignore=shutil.ignore_patterns("winners"))
    return {**os.environ, "HF_HOME": HF_HOME, _place(): str(folder)}


def _finish(options: argparse.Namespace, shares: list[dict[str, Any]], lines: list[str]) -> None:
    from smoe.machine.measure import describe_machine, describe_versions

    text = json.dumps(
        {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": describe_versions(),
            "model": Path(options.model).name,
            "text": options.text.name,
            "judged_on": options.judge.name,
            "tokens": options.tokens,
            "warm_tokens": WARM_TOKENS,
            "bar": BAR,
            "settings": options.set,
            "shares": shares,
        }
    )
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf8")
        options.out.with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf8")
    print(text)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--resident", default="13%,25%,50%", help="shares of the experts in memory")
    parser.add_argument("--text", type=Path, required=True, help="what the tournament is held on")
    parser.add_argument("--judge", type=Path, default=TEXT, help="what everybody is run on [default: %(default)s]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="timed ones of each run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="of the tournament and all runs"
    )
    parser.add_argument("--out", type=Path, help="the result as a file, and the table beside it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
