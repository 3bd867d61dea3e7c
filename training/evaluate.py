"""Scores and pictures of the exported model.

    python -m training.evaluate --model src/smoe/demo --data PATH_TO_TRAIN_DATA --questions PATH/synthqa.jsonl

Definitions. Perplexity is per token over held-out documents cut into windows of at most 512 tokens, each predicted from
its own window only. Bits per byte divide the same loss by the bytes of the text, so tokenizers can be compared.
Accuracy is normalised exact match of the greedy answer. `usage` of an expert is its share of all choices of its layer;
`usage_entropy` is the entropy of the usage over log E (1 = perfectly even); `router_entropy` is the mean entropy of a
token's router distribution over log E (1 = the router has no opinion); `persistence` is the probability that an expert
active for a token is active for the next token, and `persistence_by_chance` what independent tokens with the same usage
would give. An expert is dead when its usage is below a twentieth of 1 / E.
"""

from __future__ import annotations

import argparse
import json
import math
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from training.data import MIXTURE, read_validation
from training.export import from_transformers
from training.model import ModelConfig, MoeModel, Routing

WINDOW_TOKENS = 512
DEAD_SHARE = 0.05
"""Below this fraction of the even share an expert counts as dead."""


@dataclass
class UsageCounter:
    """Sums of the routing decisions over a text, layer by layer."""

    config: ModelConfig
    chosen: Tensor = field(init=False)
    """Choices of each expert [L, E]."""
    router_entropy: Tensor = field(init=False)
    """Sum over tokens of the entropy of the router distribution, nats [L]."""
    kept: Tensor = field(init=False)
    """Choices that the next token of the same window repeats [L]."""
    tokens: int = 0
    pairs: int = 0

    def __post_init__(self) -> None:
        layers = self.config.num_hidden_layers
        self.chosen = torch.zeros(layers, self.config.num_experts)
        self.router_entropy, self.kept = torch.zeros(layers), torch.zeros(layers)

    def add(self, routing: Routing) -> None:
        """Count one window (a batch of one row)."""
        length = routing.top_k_index[0].shape[0]
        for layer, (logits, index) in enumerate(zip(routing.router_logits, routing.top_k_index, strict=True)):
            self.chosen[layer] += torch.bincount(index.reshape(-1), minlength=self.config.num_experts)
            log_p = logits.float().log_softmax(-1)
            self.router_entropy[layer] -= (log_p.exp() * log_p).sum()
            active = torch.zeros_like(logits).scatter(1, index, 1.0)  # [T, E]
            self.kept[layer] += (active[1:] * active[:-1]).sum()
        self.tokens += length
        self.pairs += length - 1

    def summary(self) -> dict[str, object]:
        """The statistics defined in the module docstring."""
        experts, top_k = self.config.num_experts, self.config.num_experts_per_tok
        usage = self.chosen / self.chosen.sum(-1, keepdim=True)
        entropy = -(usage * usage.clamp_min(1e-12).log()).sum(-1) / math.log(experts)
        active = self.chosen / self.tokens  # probability of being active
        return {
            "tokens": self.tokens,
            "usage_entropy": rounded(entropy),
            "router_entropy": rounded(self.router_entropy / self.tokens / math.log(experts)),
            "persistence": rounded(self.kept / (self.pairs * top_k)),
            "persistence_by_chance": rounded(active.square().sum(-1) / top_k),
            "dead_experts": [(row < DEAD_SHARE / experts).sum().item() for row in usage],
            "never_used": [(row == 0).sum().item() for row in self.chosen],
            "largest_usage": rounded(usage.max(-1).values),
        }


def rounded(values: Tensor) -> list[float]:
    """A tensor as a list with four decimals."""
    return [round(value, 4) for value in values.tolist()]


@torch.no_grad()
def score_text(
    model: MoeModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    usage: UsageCounter,
) -> dict[str, float]:
    """Perplexity and bits per byte of documents; their routing is added to `usage`."""
    nats, tokens, n_bytes = 0.0, 0, 0
    for text in texts:
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        n_bytes += len(text.encode())
        for start in range(0, len(ids) - 1, WINDOW_TOKENS):
            window = torch.tensor([ids[start : start + WINDOW_TOKENS + 1]])
            hidden_states, routing = model(window[:, :-1])
            logits = model.logits(hidden_states[0]).float()
            nats += functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
            tokens += window.shape[1] - 1
            usage.add(routing)
    return {
        "perplexity": round(math.exp(nats / tokens), 3),
        "bits_per_byte": round(nats / math.log(2) / n_bytes, 4),
        "tokens": tokens,
        "documents": len(texts),
    }


def take_bytes(texts: list[str], limit_bytes: int) -> list[str]:
    """The first documents that make up about `limit_bytes`."""
    taken, size = [], 0
    for text in texts:
        if size >= limit_bytes:
            break
        taken.append(text)
        size += len(text)
    return taken


def normalise(answer: str) -> str:
    """Lower case, first line, no punctuation or articles, single spaces."""
    line = answer.strip().split("\n")[0].lower()
    words = line.translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if word not in {"a", "an", "the"})


@torch.no_grad()
def greedy_answers(
    model: MoeModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    max_new_tokens: int = 8,
    rows: int = 50,
) -> list[str]:
    """Greedy continuations up to the end of text or line.

    Prompts are padded on the right: attention is causal and experts see one token at a time, so padding has no effect.
    """
    answers: dict[int, str] = {}
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(prompts), rows):
        picks = by_length[start : start + rows]
        sequences = [tokenizer(prompts[i])["input_ids"] for i in picks]
        begins = [len(sequence) for sequence in sequences]
        for _ in range(max_new_tokens):
            width = max(map(len, sequences))
            batch = torch.tensor([s + [tokenizer.pad_token_id] * (width - len(s)) for s in sequences])
            hidden_states, _ = model(batch)
            last = hidden_states[torch.arange(len(picks)), torch.tensor([len(s) - 1 for s in sequences])]
            for sequence, token in zip(sequences, model.logits(last).argmax(-1).tolist(), strict=True):
                sequence.append(token)
        for pick, begin, sequence in zip(picks, begins, sequences, strict=True):
            continuation = sequence[begin:]
            if tokenizer.eos_token_id in continuation:
                continuation = continuation[: continuation.index(tokenizer.eos_token_id)]
            answers[pick] = str(tokenizer.decode(continuation))
    return [answers[i] for i in range(len(prompts))]


def score_questions(model: MoeModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> dict[str, object]:
    """Exact-match accuracy on the held-out generated questions, overall and by kind."""
    items = [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]
    answers = greedy_answers(model, tokenizer, [item["prompt"] for item in items])
    kinds: dict[str, list[bool]] = {}
    for item, answer in zip(items, answers, strict=True):
        kinds.setdefault(item["subject"], []).append(normalise(answer) == normalise(item["answer"]))
    right = sum(sum(marks) for marks in kinds.values())
    return {
        "accuracy": round(right / len(items), 4),
        "questions": len(items),
        "by_kind": {kind: {"accuracy": round(sum(m) / len(m), 3), "n": len(m)} for kind, m in sorted(kinds.items())},
    }


def evaluate(folder: Path, data: Path, questions: Path | None, limit_bytes: int) -> tuple[dict[str, Any], Tensor]:
    """All scores of an exported model, and the usage counts [L, E]."""
    model, tokenizer = from_transformers(folder), AutoTokenizer.from_pretrained(folder)
    usage = UsageCounter(model.config)
    validation = read_validation(data)
    scores: dict[str, object] = {
        "validation": {
            name: score_text(model, tokenizer, take_bytes(validation[name], limit_bytes), usage) for name in MIXTURE
        }
    }
    scores["routing"] = usage.summary()
    if questions is not None:
        scores["synthqa"] = score_questions(model, tokenizer, questions)
    return scores, usage.chosen


def write_scores(path: Path, scores: dict[str, Any]) -> None:
    """Write JSON under a temporary name and rename it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(scores, indent=1) + "\n")
    temporary.replace(path)


def training_facts(run: Path) -> dict[str, object]:
    """Steps, tokens and speed from the log of a run."""
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    speeds = sorted(record["tokens_per_second"] for record in records)
    return {
        "steps": records[-1]["step"],
        "tokens": records[-1]["tokens"],
        "tokens_per_second_median": speeds[len(speeds) // 2],
        "tokens_per_second_best": speeds[-1],
        "started_utc": records[0]["clock"],
        "ended_utc": records[-1]["clock"],
    }


def main() -> None:
    """Evaluate from the command line."""
    parser = argparse.ArgumentParser(description="Score the exported model and draw its pictures.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--data", type=Path, required=True, help="folder with valid.jsonl.xz")
    parser.add_argument("--questions", type=Path, help="synthqa.jsonl with prompt, answer and subject")
    parser.add_argument("--run", type=Path, help="training run, for its facts and the loss curve")
    parser.add_argument("--scores", type=Path, help="file of the scores (default: MODEL/scores.json)")
    parser.add_argument("--figures", type=Path, help="folder for the pictures; none are drawn without it")
    parser.add_argument("--limit-bytes", type=int, default=1_000_000, help="validation text a source")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    scores, chosen = evaluate(arguments.model, arguments.data, arguments.questions, arguments.limit_bytes)
    if arguments.run is not None:
        scores["training"] = training_facts(arguments.run)
    write_scores(arguments.scores or arguments.model / "scores.json", scores)
    if arguments.figures is not None:
        from training.figures import draw_loss, draw_usage

        draw_usage(chosen, arguments.figures / "usage.png")
        if arguments.run is not None:
            draw_loss(arguments.run / "log.jsonl", arguments.figures / "loss.png")
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
