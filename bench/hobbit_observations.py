"""What HOBBIT builds on, observed on our models by plain transformers (arXiv 2411.01433, figures 5 and 7).

    python -m bench.hobbit_observations MODEL ... [--tokens 1024] [--text FILE] [--out FILE.json]

*Figure 5a*: how the size of what an expert adds, ||g E(x)||, goes with its routing weight g: Pearson's correlation over
all routes, each layer's sizes divided by their mean. *Figure 5b*: shares of routes by unimportance at the paper's
thresholds 0.6 and 0.9. *Figure 7*: cosine similarity of the router inputs of layers 1, 2 and 3 apart, and how often the
later router, applied to the earlier input, names the expert of highest weight first. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from smoe.policy.importance import unimportance

TEXT = Path(__file__).parent.parent / "src" / "smoe" / "demo" / "stories.jsonl"
AHEAD = (1, 2, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {str(path.name): observe(path, options.text, options.tokens) for path in options.models}
    for name, values in found.items():
        print(name, json.dumps(values, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(found) + "\n", encoding="utf8")
    print(json.dumps(found))


def observe(path: Path, text: Path, tokens: int) -> dict[str, Any]:
    """All observations of one model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = "\n\n".join(json.loads(line)["text"] for line in text.read_text(encoding="utf8").splitlines())
    ids = AutoTokenizer.from_pretrained(path)(words, return_tensors="pt").input_ids[:, :tokens]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
    routers = {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}
    inputs: list[torch.Tensor] = []
    heard: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        inputs.append(args[0].reshape(-1, args[0].shape[-1]))
        weights, index = output[-2], output[-1]
        heard.append((weights.float(), index))

    for router in routers.values():
        router.register_forward_hook(note)
    with torch.no_grad():
        for window in ids.split(256, 1):
            model(window, use_cache=False)
        layers = len(routers)
        stacked = [torch.cat(inputs[layer::layers]) for layer in range(layers)]
        weights = [torch.cat([w for w, _ in heard[layer::layers]]) for layer in range(layers)]
        index = [torch.cat([i for _, i in heard[layer::layers]]) for layer in range(layers)]
        experts = [model.get_submodule(name.rpartition(".")[0]).experts for name in routers]
        return {
            "correlation_of_weight_and_size": _correlation(experts, stacked, weights, index),
            "shares_at_0.6_0.9": _shares(torch.cat(weights)),
            "later_layers": _similarity(list(routers.values()), stacked),
        }


def _correlation(
    experts: list[Any], inputs: list[torch.Tensor], weights: list[torch.Tensor], index: list[torch.Tensor]
) -> float:
    sizes, gains = [], []
    for block, x, w, chosen in zip(experts, inputs, weights, index, strict=True):
        of_layer, of_weights = [], []
        for expert in range(block.num_experts):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            if len(token):
                one = torch.full((len(token), 1), expert), torch.ones(len(token), 1)
                out = block(x[token], *one)
                of_layer.append(out.norm(dim=-1) * w[token, place])
                of_weights.append(w[token, place])
        size, gain = torch.cat(of_layer), torch.cat(of_weights)
        sizes.append(size / size.mean())
        gains.append(gain / gain.mean())
    return float(np.corrcoef(torch.cat(sizes).numpy(), torch.cat(gains).numpy())[0, 1])


def _shares(weights: torch.Tensor) -> list[float]:
    """Of routes: high, low, skipped."""
    scaled = (weights / weights.sum(-1, keepdim=True)).tolist()
    values = np.array([value for row in scaled for value in unimportance(row)])
    return [
        float((values <= 0.6).mean()),
        float(((values > 0.6) & (values <= 0.9)).mean()),
        float((values > 0.9).mean()),
    ]


def _similarity(routers: list[nn.Module], inputs: list[torch.Tensor]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for ahead in AHEAD:
        values: dict[str, list[float]] = defaultdict(list)
        for layer in range(len(inputs) - ahead):
            here, there = inputs[layer], inputs[layer + ahead]
            values["cosine"].append(float(nn.functional.cosine_similarity(here, there, dim=-1).mean()))
            weight = routers[layer + ahead].get_parameter("weight").float()
            guess, truth = here @ weight.T, there @ weight.T
            values["top_1"].append(float((guess.argmax(-1) == truth.argmax(-1)).float().mean()))
        found[str(ahead)] = {name: float(np.mean(of)) for name, of in values.items()}
    return found


if __name__ == "__main__":
    main()
