"""What predictors that see only the history of routing are worth on unseen text: DuoServe's ExpertMLP and simpler ones.

    python -m bench.predictors DATA --traces FOLDER [--models demo,training/witness] [--tokens N] [--epochs N] [--out F]

DATA has `train/valid.jsonl.xz` and `eval/wiki_text.jsonl` (texts that no model was trained on). For each model `smoe
record` reads stories to fit on, and three texts to be judged on: other stories, Python and encyclopedia; traces that
are in FOLDER already are taken. Every predictor is fitted on the first `--tokens` of the stories, and once more, but
for the network, on all of them. Prints a table for each model and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from smoe import __version__
from smoe.config import EngineConfig
from smoe.eval.tune_predictor import PAPER, PredictorTuning, tune_predictor
from smoe.models.read_spec import read_spec
from smoe.policy.registry import EXPERT_MLP
from smoe.prediction.activation_path import RoutedLayer

FITTED_STORIES = 110
"""Of the stories, the first so many are fitted on, the others judged on."""
TEXTS = {"train": 26000, "stories": 5000, "code": 5000, "wiki": 4000}
"""Tokens recorded of each text, at most."""
CONTEXT = 512


def main() -> None:
    options = _parse()
    torch.set_num_threads(1)
    texts, results = _texts(options.data), []
    for model in options.models.split(","):
        traces = {name: _recorded(model, name, documents, options.traces) for name, documents in texts.items()}
        spec = read_spec(model, EngineConfig())
        layers = tuple(RoutedLayer(site.layer, site.experts, spec.anatomy.top_k[site.layer]) for site in spec.sites)
        fitted, held_out = [traces.pop("train")], list(traces.values())
        checkpoint = options.traces / f"{Path(model).name}.training"
        network = tune_predictor(
            EXPERT_MLP, fitted, held_out, layers, options.tokens, checkpoint, most_epochs=options.epochs
        )
        counts = tune_predictor("affinity", fitted, held_out, layers, None, None)
        results.append({"model": Path(model).name, "network": network.as_json(), "all_tokens": counts.as_json()})
        for found in (network, counts):
            _print(model, found)
        result = {"smoe": __version__, "torch": torch.__version__, "paper": PAPER, "models": results}
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    print(json.dumps(result))


def _texts(data: Path) -> dict[str, list[str]]:
    with lzma.open(data / "train" / "valid.jsonl.xz", "rt", encoding="utf8") as file:
        documents: list[dict[str, Any]] = [json.loads(line) for line in file]
    stories = [each["text"] for each in documents if each["src"] == "tinystories"]
    encyclopedia = (data / "eval" / "wiki_text.jsonl").read_text(encoding="utf8").splitlines()
    return {
        "train": stories[:FITTED_STORIES],
        "stories": stories[FITTED_STORIES:],
        "code": [each["text"] for each in documents if each["src"].startswith("code")],
        "wiki": [json.loads(line)["prompt"] for line in encyclopedia],
    }


def _recorded(model: str, name: str, documents: list[str], folder: Path) -> Path:
    """A trace of the model reading these documents, recorded if it is not there."""
    path = folder / f"{Path(model).name}-{name}.trace"
    if not path.exists():
        text = folder / f"{name}.jsonl"
        text.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents), encoding="utf8")
        options = ["--text", text, "--tokens", TEXTS[name], "--context", CONTEXT, "--out", path]
        subprocess.run([sys.executable, "-m", "smoe", "record", model, *map(str, options)], check=True)
    return path


def _print(model: str, found: PredictorTuning) -> None:
    took = "counted"
    if found.training is not None:
        took = f"{len(found.training.losses)} epochs in {found.training.core_seconds:.0f} s of one core"
    print(f"\n{model}: {found.fitted.name} fitted on {found.fitted.tokens} tokens, {took}")
    for row in _rows(found):
        print(row, flush=True)


def _rows(found: PredictorTuning) -> Iterator[str]:
    yield f"{'':<20}" + "".join(f"{trace:>28}" for trace in found.rates) + f"{'a guess':>12}"
    for name in next(iter(found.rates.values())):
        rates = [of[name] for of in found.rates.values()]
        cells = (f"{each.exact:>11.1%} {each.at_least_one:>7.1%} {each.recall:>7.1%}" for each in rates)
        yield f"{name:<20}" + "".join(f"{cell:>28}" for cell in cells) + f"{1e3 * rates[0].seconds:>9.2f} ms"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", type=Path, help="the folder of the texts")
    parser.add_argument("--traces", type=Path, required=True, help="where traces are, or are put")
    parser.add_argument("--models", default="demo,training/witness")
    parser.add_argument("--tokens", type=int, default=4000, help="that the network is trained on")
    parser.add_argument("--epochs", type=int, help="at most")
    parser.add_argument("--out", type=Path, help="the result as a file, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
