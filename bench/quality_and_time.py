"""Quality against time: what presets and their switches give up, and what they save, on the same forced tokens.

    python -m bench.quality_and_time MODEL --memory 2GiB [--batch 3] [--rounds 3] [--device rtx-a6000] [--configs FILE]
    python -m bench.quality_and_time --draw RESULT.json ... --picture FILE.png

Every configuration runs in a fresh process, the configurations one after the other and the rounds one after the other,
so that a drift of the machine falls on all. A process reads a prompt (the time to the first token), decodes some forced
tokens untimed and the rest timed; what it expected of each is kept. Compared with the exact engine of the same round:
time per token, the change of perplexity on these tokens (interval of 95 % from resampled blocks), the divergence of the
next-token distributions (nats a token), and the bytes read. With `--device` on the emulated device of that profile,
experts paced as if they had `--expert-bytes`. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

PROMPT_TOKENS, WARM_TOKENS, CONTEXT_TOKENS = 64, 32, 1024
BLOCK = 16
"""Tokens that are resampled together."""
TEXT = Path(__file__).parent.parent / "src" / "smoe" / "demo" / "stories.jsonl"

_COLOURS = {"smoe": "C0", "hobbit": "C1", "balanced": "C2", "hobbit-exact": "C4", "balanced-up": "C5"}

CONFIGS: dict[str, dict[str, Any]] = {
    "exact": {},
    "exact lru": {"preset": "lru"},
    **{f"smoe {alpha:g}": {"preset": "smoe", "alpha": alpha} for alpha in (0.15, 0.3, 0.45, 0.6)},
    **{
        f"hobbit {low:g} {skip:g}": {"preset": "hobbit", "low_threshold": low, "skip_threshold": skip}
        for low, skip in ((0.6, 1.0), (0.6, 0.9), (0.3, 0.8), (0.0, 0.6))
    },
    **{
        f"balanced {share:g}": {"preset": "balanced", "max_perplexity_increase": share}
        for share in (0.001, 0.003, 0.01, 0.03)
    },
}
"""Preset and switches by name; the first is what the others are compared with."""

_WORKER = """
import json, sys, time
import numpy as np
import torch
from smoe import from_pretrained
asked = json.loads(sys.argv[1])
model = from_pretrained(asked["model"], context_tokens=asked["context"], **asked["switches"])
engine, rows = model.offload, torch.tensor(asked["rows"])
engine.wait_ready()
cache, begin = engine.new_cache(len(rows)), asked["prompt"]
seconds, kept = [], []
with torch.no_grad():
    started = engine.now()
    out = model(input_ids=rows[:, :begin], past_key_values=cache, use_cache=True, logits_to_keep=1)
    ttft = engine.now() - started
    for n in range(begin, rows.shape[1] - 1):
        if n == begin + asked["warm"]:
            before = engine.stats()
        started = engine.now()
        out = model(input_ids=rows[:, n : n + 1], past_key_values=cache, use_cache=True)
        ended = engine.now()
        if n >= begin + asked["warm"]:
            seconds.append(ended - started)
            kept.append(out.logits[:, -1].float().log_softmax(-1).half().numpy())
stats = engine.stats() - before
np.save(asked["out"], np.stack(kept))
print(json.dumps({"seconds": seconds, "ttft_seconds": ttft, "peak_memory_bytes": engine.peak_memory_bytes(),
    "hit_ratio": stats.hit_ratio, "bytes_per_token": stats.bytes_read / len(seconds),
    "low_served": stats.low_served / max(1, stats.decode_uses), "substituted": stats.substituted,
    "skipped": stats.skipped, "plan_seconds": stats.plan_seconds / len(seconds),
    "wait_seconds": stats.wait_seconds / len(seconds),
    "resident_share": engine.ledger.resident_share, "low_slots": engine.ledger.low_slots}))
engine.close()
"""


def main() -> None:
    options = _parse()
    if options.draw:
        draw([json.loads(path.read_text(encoding="utf8").splitlines()[-1]) for path in options.draw], options.picture)
        return
    configs = CONFIGS if options.configs is None else json.loads(options.configs.read_text(encoding="utf8"))
    configs = {name: of for name, of in configs.items() if options.only is None or name.split()[0] in options.only}
    rows = _rows(options)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in configs}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            exact: np.ndarray | None = None
            for name, switches in configs.items():
                run, log_p = _run(options, switches, rows, Path(folder) / "log_p.npy")
                exact = log_p if exact is None else exact
                results[name].append(run | _quality(log_p, exact, rows))
                print(_line(name, results[name][-1]), file=sys.stderr, flush=True)
    _finish(options, results)


def _run(
    options: argparse.Namespace, switches: dict[str, Any], rows: list[list[int]], out: Path
) -> tuple[dict[str, Any], np.ndarray]:
    """One process: what it measured, and its log-probabilities [tokens, rows, vocabulary]."""
    given = {"memory": options.memory, "max_sequences": len(rows)} | switches
    if options.device is not None:
        given |= {"device": "emulated", "profile": options.device, "emulated_expert_bytes": options.expert_bytes}
    asked = {
        "model": str(options.model.resolve()),
        "context": CONTEXT_TOKENS,
        "switches": given,
        "rows": rows,
        "prompt": PROMPT_TOKENS,
        "warm": WARM_TOKENS,
        "out": str(out),
    }
    command = [sys.executable, "-c", _WORKER, json.dumps(asked)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{switches} failed:\n{ended.stderr[-2000:]}")
    return json.loads(ended.stdout.splitlines()[-1]), np.load(out).astype(np.float32)


def _quality(log_p: np.ndarray, exact: np.ndarray, rows: list[list[int]]) -> dict[str, Any]:
    """The price on these tokens: relative change of perplexity with its interval, and nats of divergence."""
    following = np.array(rows)[:, PROMPT_TOKENS + WARM_TOKENS + 1 :].T  # [tokens, rows]
    nats = -np.take_along_axis(log_p, following[..., None], -1)[..., 0]
    of_exact = -np.take_along_axis(exact, following[..., None], -1)[..., 0]
    change = (nats - of_exact).mean(1)
    blocks = change[: len(change) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(1)
    drawn = np.random.default_rng(0).integers(0, len(blocks), (2000, len(blocks)))
    low, high = np.percentile(np.expm1(blocks[drawn].mean(1)), [2.5, 97.5])
    divergence = (np.exp(exact) * (exact - log_p)).sum(-1).mean()
    return {
        "perplexity_change": float(np.expm1(change.mean())),
        "perplexity_low": float(low),
        "perplexity_high": float(high),
        "kl_nats": float(divergence),
    }


def _line(name: str, run: dict[str, Any]) -> str:
    return (
        f"{name:<18} {1e3 * median(run['seconds']):8.2f} ms a token, mean {1e3 * np.mean(run['seconds']):8.2f}, "
        f"perplexity {100 * run['perplexity_change']:+.2f} % "
        f"({100 * run['perplexity_low']:+.2f} .. {100 * run['perplexity_high']:+.2f}), {run['kl_nats']:.5f} nats, "
        f"hits {run['hit_ratio']:.3f}, {run['bytes_per_token'] / 1e6:.1f} MB"
    )


def _finish(options: argparse.Namespace, results: dict[str, list[dict[str, Any]]]) -> None:
    from smoe.machine.measure import describe_machine, describe_versions

    base = results[next(iter(results))]
    table = {}
    for name, runs in results.items():
        pairs = list(zip(runs, base, strict=True))
        ratios = [np.mean(run["seconds"]) / np.mean(exact["seconds"]) for run, exact in pairs]
        table[name] = {
            "mean_seconds": [float(np.mean(run["seconds"])) for run in runs],
            "ratio": _spread(ratios),
            "ttft_seconds": [run["ttft_seconds"] for run in runs],
            "ttft_ratio": _spread([run["ttft_seconds"] / exact["ttft_seconds"] for run, exact in pairs]),
            "peak_memory_bytes": max(run["peak_memory_bytes"] for run in runs),
            "kl_nats": float(median(run["kl_nats"] for run in runs)),
            "perplexity_change": float(median(run["perplexity_change"] for run in runs)),
        }
        print(f"{name:<18} ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", file=sys.stderr)
    found = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "model": options.model.name,
        "memory": options.memory,
        "batch": options.batch,
        "device": options.device,
        "expert_bytes": options.expert_bytes,
        "tokens": options.tokens,
        "table": table,
        "rounds": results,
    }
    text = json.dumps(found)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf8")
    print(text)


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"median": float(median(ratios)), "least": float(min(ratios)), "most": float(max(ratios))}


def draw(results: list[dict[str, Any]], picture: Path) -> None:
    """Each result a panel: time per token over nats of divergence, a line for each preset."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(5.2 * len(results), 4.2), squeeze=False)
    for panel, result in zip(panels[0], results, strict=True):
        families: dict[str, list[tuple[float, float]]] = {}
        for name, entry in result["table"].items():
            point = (entry["kl_nats"], 1e3 * float(np.median(entry["mean_seconds"])))
            families.setdefault(name.split()[0], []).append(point)
        for family, points in families.items():
            points.sort()
            if family == "exact":
                panel.axhline(points[0][1], color="0.5", linestyle=":", label="exact")
                continue
            nats, times = zip(*points, strict=True)
            panel.plot([1e3 * nat for nat in nats], times, marker="o", label=family, color=_COLOURS.get(family))
        panel.set_xlim(left=-0.3)
        panel.set_xlabel("divergence from the exact model, thousandths of a nat a token")
        panel.set_ylabel("ms a token")
        panel.set_ylim(bottom=0)
        where = result["device"] or f"{result['memory']} of memory"
        panel.set_title(f"{result['model']} demo, {where}, batch {result['batch']}")
        panel.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def _rows(options: argparse.Namespace) -> list[list[int]]:
    """The text's tokens, one piece for each sequence."""
    from transformers import AutoTokenizer

    count = PROMPT_TOKENS + WARM_TOKENS + options.tokens + 1
    path = options.text or TEXT
    text = path.read_text(encoding="utf8")
    if path.suffix == ".jsonl":
        text = "\n\n".join(json.loads(line)["text"] for line in text.splitlines())
    ids = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"]
    rows = [ids[n * count : (n + 1) * count] for n in range(options.batch)]
    if len(rows[-1]) < count:
        raise SystemExit(f"the text has {len(ids)} tokens, {options.batch * count} are needed")
    return rows


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160, help="timed ones")
    parser.add_argument("--device", help="the emulated device of this profile")
    parser.add_argument("--expert-bytes", type=int, default=9 * 2**20, help="of the experts that are acted")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--configs", type=Path, help="JSON: preset and switches by name")
    parser.add_argument("--only", nargs="+", help="the first words of names")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
