"""How well later routers are guessed, by the next gate and by ways to correct it, on text that none has learned from.

    python -m bench.guesses MODEL --train FILE.jsonl [--tokens 8000] --judge FILE.jsonl ... [--out FILE.json]

Plain transformers reads the texts, document by document; counts only. *Recall*: share of the experts chosen that are
among as many guesses, means over the layers, by distance. *of missing*: precision and recall for the experts that an
LRU with `--share` of all experts lacks, of the guesses of a calibrated probability of 0.4 or more where there is one.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from smoe.models.router_matrix import RouterMatrix
from smoe.policy.trial import WORTH
from smoe.prediction import correction
from smoe.prediction.correction import Correction, fitted, uncorrected, with_confidence

DISTANCES = (1, 2, 3, 4)
Inputs = dict[str, torch.Tensor]


class Text(NamedTuple):
    """What the routers were given and chose, by layer, and where a token had one before it."""

    hidden: list[torch.Tensor]
    top_k_index: list[torch.Tensor]
    has_before: torch.Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--judge", type=Path, nargs="+", required=True)
    parser.add_argument("--judge-tokens", type=int, default=2000)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    reader = Reader(options.model)
    train = reader.read(options.train, options.tokens)
    texts = {path.stem: reader.read(path, options.judge_tokens) for path in options.judge}
    lacking = {name: missing(text, options.share, reader.experts) for name, text in texts.items()}
    found = {}
    for way in options.ways:
        began = time.perf_counter()
        corrections = {
            (layer, layer + ahead): calibrated(way, train, reader, layer, layer + ahead)
            for ahead in DISTANCES
            for layer in range(len(reader.routers) - ahead)
        }
        seconds = round(time.perf_counter() - began, 1)
        found[way] = {"seconds": seconds} | {
            name: judged(corrections, text, reader, lacking[name]) for name, text in texts.items()
        }
        print(way, json.dumps(found[way]), flush=True)
    circumstances = {"model": options.model.name, "train": options.train.stem, "tokens": len(train.has_before)}
    result = circumstances | {"share": options.share, "ways": found}
    if options.out is not None:
        options.out.write_text(json.dumps(result) + "\n", encoding="utf8")
    print(json.dumps(result))


class Reader:
    """A model by plain transformers, whose routers are overheard."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        modules = [module for name, module in self._model.named_modules() if name.endswith("mlp.gate")]
        self.routers = [module.weight.detach().float() for module in modules]
        self.experts = len(self.routers[0])
        self._heard: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in modules]
        for heard, module in zip(self._heard, modules, strict=True):
            module.register_forward_hook(self._note(heard))

    def _note(self, heard: list[Any]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            heard.append((args[0].reshape(-1, args[0].shape[-1]).float(), output[-1]))

        return hook

    def read(self, path: Path, tokens: int) -> Text:
        """The first tokens of a file, at most 512 of each document."""
        for heard in self._heard:
            heard.clear()
        has_before: list[bool] = []
        for line in path.read_text(encoding="utf8").splitlines():
            record = json.loads(line)
            words = record.get("text") or f"{record['prompt']} {record.get('answer', '')}"
            ids = self._tokenizer(words, return_tensors="pt").input_ids[:, : min(512, tokens - len(has_before))]
            with torch.no_grad():
                self._model.model(ids, use_cache=False)
            has_before += [token > 0 for token in range(ids.shape[1])]
            if len(has_before) >= tokens:
                break
        parts = [[torch.cat(values) for values in zip(*heard, strict=True)] for heard in self._heard]
        return Text([part[0] for part in parts], [part[1] for part in parts], torch.tensor(has_before))


def inputs_of(text: Text, layer: int, after: int) -> Inputs:
    """hidden [T, H], the later layer's for the token before [T, H], and where there is one [T]."""
    later = text.hidden[after]
    before = torch.cat([torch.zeros_like(later[:1]), later[:-1]])
    return {"hidden": text.hidden[layer], "before": before, "has_before": text.has_before}


def gate(inputs: Inputs, logits: torch.Tensor, router: torch.Tensor) -> Correction:
    return uncorrected(RouterMatrix(router, None))


def diagonal(inputs: Inputs, logits: torch.Tensor, router: torch.Tensor, target: torch.Tensor) -> Correction:
    """Every number of the input scaled and shifted by itself."""
    return _low_rank(inputs, router, target, 0)


def rank_16(inputs: Inputs, logits: torch.Tensor, router: torch.Tensor, target: torch.Tensor) -> Correction:
    """The same, and a product of rank 16."""
    return _low_rank(inputs, router, target, 16)


def _low_rank(inputs: Inputs, router: torch.Tensor, target: torch.Tensor, rank: int) -> Correction:
    mean, target_mean = inputs["hidden"].mean(0), target.mean(0)
    x, y = inputs["hidden"] - mean, target - target_mean
    scale = (x * y).mean(0) / (x * x).mean(0)
    matrix = torch.diag(scale)
    if rank:
        gram = x.T @ x
        gram.diagonal().add_(correction.SHRINKAGE * gram.diagonal().mean())
        rest = torch.linalg.solve(gram, x.T @ (y - x * scale))
        directions = torch.linalg.svd(x @ rest, full_matrices=False).Vh[:rank]
        matrix = matrix + rest @ directions.T @ directions
    return _alone(router @ matrix.T, router @ (target_mean - mean @ matrix))


def _alone(weight: torch.Tensor, bias: torch.Tensor) -> Correction:
    return Correction(torch.cat([weight, torch.zeros_like(weight)], 1), bias, bias, 0.0, 30.0)


def alone(inputs: Inputs, logits: torch.Tensor, router: torch.Tensor) -> Correction:
    """Regression on this token's input only."""
    nothing = torch.zeros_like(inputs["has_before"])
    return fitted(inputs["hidden"], inputs["before"], nothing, logits, router)


def both(inputs: Inputs, logits: torch.Tensor, router: torch.Tensor) -> Correction:
    """Regression on this token's and the token before's."""
    return fitted(**inputs, logits=logits, router=router)


def by_descent(inputs: Inputs, logits: torch.Tensor, router: torch.Tensor) -> Correction:
    """Four epochs of Adam from the regression on both, towards the distribution that the router gives."""
    start = both(inputs, logits, router)
    x = torch.cat([inputs["hidden"], inputs["before"]], 1)
    weight, bias = start.weight.clone().requires_grad_(), start.bias.clone().requires_grad_()
    optimizer = torch.optim.Adam([weight, bias], lr=3e-4)
    chance = torch.Generator().manual_seed(0)
    for _ in range(4):
        for rows in torch.randperm(len(x), generator=chance).split(256):
            guess = x[rows] @ weight.T + bias
            error = -(logits[rows].softmax(1) * guess.log_softmax(1)).sum(1).mean()
            optimizer.zero_grad()
            error.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return start._replace(weight=weight.detach(), bias=bias.detach())


TOP_K = 8
"""Of the embedded model."""
WAYS: dict[str, Callable[..., Correction]] = {
    "next gate": gate,
    "diagonal": diagonal,
    "diagonal and rank 16": rank_16,
    "regression": alone,
    "regression, token before": both,
    "the same, by descent": by_descent,
}


def calibrated(way: str, train: Text, reader: Reader, layer: int, after: int) -> Correction:
    """Fitted on the first 90 % of the text; how sure, by the rest. The next gate's is for its margin, too."""
    inputs, router = inputs_of(train, layer, after), reader.routers[after]
    logits, end = train.hidden[after] @ router.T, int(0.9 * len(train.has_before))
    first = {name: value[:end] for name, value in inputs.items()}
    arguments = (first, logits[:end], router)
    fit = WAYS[way]
    found = fit(*arguments, train.hidden[after][:end]) if fit in (diagonal, rank_16) else fit(*arguments)
    margin = margins(guessed(found, {name: value[end:] for name, value in inputs.items()}))
    return with_confidence(found, margin, chosen(train, after, reader.experts)[end:])


def guessed(found: Correction, inputs: Inputs) -> torch.Tensor:
    """[T, E] logits."""
    with_before = found.logits(inputs["hidden"], inputs["before"])
    return torch.where(inputs["has_before"].unsqueeze(1), with_before, found.logits(inputs["hidden"], None))


def margins(logits: torch.Tensor) -> torch.Tensor:
    """[T, E]: how far inside the choice."""
    return logits - logits.topk(TOP_K + 1).values[:, TOP_K - 1 :].mean(1, keepdim=True)


def chosen(text: Text, layer: int, experts: int) -> torch.Tensor:
    """[T, E]: whether each expert was chosen."""
    index = text.top_k_index[layer]
    return torch.zeros(len(index), experts, dtype=torch.bool).scatter_(1, index, True)


def missing(text: Text, share: float, experts: int) -> list[torch.Tensor]:
    """[T, E] by layer: what an LRU lacks when the layer is about to run."""
    rows = [index.tolist() for index in text.top_k_index]
    slots, kept = int(share * experts * len(rows)), OrderedDict[tuple[int, int], None]()
    lacks = [torch.ones(len(of), experts, dtype=torch.bool) for of in rows]
    for token in range(len(rows[0])):
        for layer, of in enumerate(rows):
            lacks[layer][token, [expert for at, expert in kept if at == layer]] = False
            for expert in of[token]:
                kept.pop((layer, expert), None)
                kept[layer, expert] = None
            while len(kept) > slots:
                kept.popitem(last=False)
    return lacks


def judged(
    corrections: dict[tuple[int, int], Correction], text: Text, reader: Reader, lacking: list[torch.Tensor]
) -> dict[str, list[float]]:
    """By distance: recall, and precision and recall of what is missing, in per cent."""
    found: dict[str, list[float]] = {"recall": [], "precision of missing": [], "recall of missing": []}
    for ahead in DISTANCES:
        recalls, right, asked, wanted = [], 0, 0, 0
        for layer in range(len(reader.routers) - ahead):
            after = layer + ahead
            margin = margins(guessed(corrections[layer, after], inputs_of(text, layer, after)))
            truth, absent = chosen(text, after, reader.experts), lacking[after]
            recalls.append(((margin > 0) & truth).sum().item() / truth.sum().item())
            worth = (margin > 0) & (corrections[layer, after].probabilities(margin) >= WORTH) & absent
            right += int((worth & truth).sum())
            asked += int(worth.sum())
            wanted += int((truth & absent).sum())
        found["recall"].append(round(100 * sum(recalls) / len(recalls), 1))
        found["precision of missing"].append(round(100 * right / max(1, asked), 1))
        found["recall of missing"].append(round(100 * right / max(1, wanted), 1))
    return found


if __name__ == "__main__":
    main()
