"""How well later routers are guessed, by the next gate, by ways to correct it and by adding other predictors' log odds,
on text that none has learned from.

    python -m bench.guesses MODEL --train FILE.jsonl [--tokens 8000] --judge FILE.jsonl ... [--out FILE.json]

Plain transformers reads the texts, document by document; counts only. *Recall*: share of the experts chosen that are
among as many guesses, means over the layers, by distance. *of missing*: precision and recall for the experts that an
LRU with `--share` of all experts lacks, of the guesses of a calibrated probability of 0.4 or more where there is one;
*said*: the mean of these probabilities, which is the precision where they are calibrated. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
    parser.add_argument("--ways", nargs="+", default=[*WAYS, *COMBINED], choices=[*WAYS, *COMBINED])
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
        make = combined if way in COMBINED else calibrated
        guesses = {
            (layer, layer + ahead): make(way, train, reader, layer, layer + ahead)
            for ahead in DISTANCES
            for layer in range(len(reader.routers) - ahead)
        }
        seconds = round(time.perf_counter() - began, 1)
        found[way] = {"seconds": seconds} | {
            name: judged(guesses, text, reader, lacking[name]) for name, text in texts.items()
        }
        if way in COMBINED:
            found[way]["weights"] = mean_weights(guesses)
        print(way, json.dumps(found[way]), flush=True)
    circumstances = {"model": options.model.name, "train": options.train.stem, "tokens": len(train.has_before)}
    result = circumstances | {"share": options.share, "ways": found}
    if options.out is not None:
        options.out.write_text(json.dumps(result) + "\n", encoding="utf8")
    print(json.dumps(result))


class Reader:
    """A model by plain transformers, whose routers are observed."""

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


class Guess(ABC):
    """What is guessed of one layer at another, and how sure it is."""

    @abstractmethod
    def of(self, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
        """What experts are ranked by, as margins, and how probable each is: [T, E] both."""


class ByGate(Guess):
    """The router of the later layer, corrected or not."""

    def __init__(self, correction: Correction, layer: int, after: int) -> None:
        self._correction, self._layer, self._after = correction, layer, after

    def of(self, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
        margin = margins(guessed(self._correction, inputs_of(text, self._layer, self._after)))
        return margin, self._correction.probabilities(margin)


def calibrated(way: str, train: Text, reader: Reader, layer: int, after: int) -> Guess:
    """Fitted on the first 90 % of the text; how sure, by the rest. The next gate's is for its margin, too."""
    end = int(0.9 * len(train.has_before))
    found = fitted_by(way, train, reader, layer, after)
    inputs = {name: value[end:] for name, value in inputs_of(train, layer, after).items()}
    wanted = chosen(train, after, reader.experts)[end:]
    return ByGate(with_confidence(found, margins(guessed(found, inputs)), wanted), layer, after)


def fitted_by(way: str, train: Text, reader: Reader, layer: int, after: int) -> Correction:
    """Fitted on the first 90 % of the text; as sure as it says."""
    inputs, router = inputs_of(train, layer, after), reader.routers[after]
    logits, end = train.hidden[after] @ router.T, int(0.9 * len(train.has_before))
    first = {name: value[:end] for name, value in inputs.items()}
    arguments = (first, logits[:end], router)
    fit = WAYS[way]
    return fit(*arguments, train.hidden[after][:end]) if fit in (diagonal, rank_16) else fit(*arguments)


COMBINED = {"combined with the next gate": "next gate", "combined": "regression, token before"}
"""Several predictors' log odds, added with learned weights: by the gate among them."""
SIGNALS = ("gate", "next gate", "uses so far", "previous token", "affinity", "constant")
FADING = 15 / 16
"""Of what is remembered of a document's uses, from token to token."""


class Combination(Guess):
    """The log odds that an expert is wanted: a weighted sum of what several predictors say."""

    def __init__(self, gates: Sequence[Correction], train: Text, reader: Reader, layer: int, after: int) -> None:
        """`gates`: the one that is combined, and the router itself. Counts are those of `train`."""
        self._gates, self._experts, self._layer, self._after = gates, reader.experts, layer, after
        here, there = (chosen(train, at, reader.experts).float() for at in (layer, after))
        self._popularity = there.mean(0).clamp(min=1 / len(there))  # [E]
        seen = here.sum(0).unsqueeze(1)
        self._affinity = log_odds((here.T @ there + 8 * self._popularity) / (seen + 8))  # [E, E], of a few tokens: p
        self.weights = torch.zeros(len(SIGNALS), dtype=torch.float64)

    def learn(self, text: Text) -> None:
        """The weights, from text that gates and counts have not seen: logistic regression by Newton's method."""
        inputs = self._signals(text).reshape(-1, len(SIGNALS))
        truth = chosen(text, self._after, self._experts).reshape(-1).double()
        for _ in range(NEWTON_STEPS):
            probable = (inputs @ self.weights).sigmoid()
            curvature = (inputs * (probable * (1 - probable)).unsqueeze(1)).T @ inputs
            curvature.diagonal().add_(1e-3)
            slopes = inputs.T @ (truth - probable) - 1e-3 * self.weights
            self.weights = self.weights + torch.linalg.solve(curvature, slopes).clamp(-5, 5)

    def of(self, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._signals(text) @ self.weights
        return margins(found), found.sigmoid()

    def _signals(self, text: Text) -> torch.Tensor:
        """[T, E, S]"""
        inputs = inputs_of(text, self._layer, self._after)
        here, there = (chosen(text, at, self._experts).float() for at in (self._layer, self._after))
        previous = torch.cat([torch.zeros_like(there[:1]), there[:-1]]) * text.has_before.unsqueeze(1)
        uses, seen, shares = torch.zeros(self._experts), 0.0, []
        for token, has_before in zip(previous, text.has_before.tolist(), strict=True):
            uses, seen = (FADING * uses + token, FADING * seen + 1) if has_before else (torch.zeros_like(uses), 0.0)
            shares.append((uses + self._popularity) / (seen + 1))
        found = [margins(guessed(gate, inputs)) for gate in self._gates]
        found += [log_odds(torch.stack(shares)), previous, here @ self._affinity / TOP_K, torch.ones_like(previous)]
        return torch.stack(found, -1).double()


NEWTON_STEPS = 15


def combined(way: str, train: Text, reader: Reader, layer: int, after: int) -> Guess:
    """Gates and counts from the first 90 % of the text, weights from the rest."""
    end = int(0.9 * len(train.has_before))
    gates = [fitted_by(name, train, reader, layer, after) for name in (COMBINED[way], "next gate")]
    found = Combination(gates, part_of(train, 0, end), reader, layer, after)
    found.learn(part_of(train, end, len(train.has_before)))
    return found


def mean_weights(guesses: Mapping[tuple[int, int], Guess]) -> dict[str, list[float]]:
    """By distance, of each signal."""
    found = [
        torch.stack(
            [
                of.weights
                for (layer, after), of in guesses.items()
                if isinstance(of, Combination) and after - layer == ahead
            ]
        ).mean(0)
        for ahead in DISTANCES
    ]
    return {name: [round(float(of[n]), 3) for of in found] for n, name in enumerate(SIGNALS)}


def part_of(text: Text, begin: int, end: int) -> Text:
    """Some of its tokens, the first of which has none before it."""
    has_before = text.has_before[begin:end].clone()
    has_before[0] = False
    hidden, top_k_index = ([of[begin:end] for of in each] for each in (text.hidden, text.top_k_index))
    return Text(hidden, top_k_index, has_before)


def log_odds(share: torch.Tensor) -> torch.Tensor:
    """Of shares from 0 to 1, as far as a few thousand tokens can tell."""
    return share.clamp(1e-4, 1 - 1e-4).logit()


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
    guesses: Mapping[tuple[int, int], Guess], text: Text, reader: Reader, lacking: list[torch.Tensor]
) -> dict[str, list[float]]:
    """By distance: recall, and precision, what was said it would be, and recall of what is missing, in per cent."""
    found: dict[str, list[float]] = {
        name: [] for name in ("recall", "precision of missing", "said of missing", "recall of missing")
    }
    for ahead in DISTANCES:
        recalls, right, said, asked, wanted = [], 0, 0.0, 0, 0
        for layer in range(len(reader.routers) - ahead):
            after = layer + ahead
            margin, probable = guesses[layer, after].of(text)
            truth, absent = chosen(text, after, reader.experts), lacking[after]
            recalls.append(((margin > 0) & truth).sum().item() / truth.sum().item())
            worth = (margin > 0) & (probable >= WORTH) & absent
            right += int((worth & truth).sum())
            said += float(probable[worth].sum())
            asked += int(worth.sum())
            wanted += int((truth & absent).sum())
        found["recall"].append(round(100 * sum(recalls) / len(recalls), 1))
        found["precision of missing"].append(round(100 * right / max(1, asked), 1))
        found["said of missing"].append(round(100 * said / max(1, asked), 1))
        found["recall of missing"].append(round(100 * right / max(1, wanted), 1))
    return found


if __name__ == "__main__":
    main()
