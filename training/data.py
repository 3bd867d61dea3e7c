"""Text to training windows: reading the shards, the tokenizer, packing, and the resumable sampler.

A window is S + 1 token ids with one loss weight each; a batch is drawn window by window from the sources in the
proportions of `MIXTURE`. Each source is walked in a shuffled order, a new one each epoch.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]

MIXTURE = {
    "tinystories": 0.46,
    "storybooks": 0.05,
    "children_books": 0.02,
    "simple_fiction": 0.01,
    "math_gsm8k": 0.01,
    "code_mbpp": 0.005,
    "code_python": 0.005,
    "synthqa": 0.44,
}
"""Share of each source in the training tokens."""

SOURCE_BYTES = {"children_books": 6_000_000, "simple_fiction": 6_000_000}
"""Bytes of text taken from the large shards: more would never be reached in a short run."""

ANSWER_WEIGHT = 20.0
"""Loss weight of the answer to a generated question (its facts are random, only the answer can be learnt)."""
FACT_WEIGHT = 0.2
"""Loss weight of the other tokens of a generated question."""
WEIGHT_SCALE = 10
"""Loss weights are stored as bytes, in tenths."""

ANSWER_MARK = "\nAnswer:"


def read_texts(path: Path, limit_bytes: int | None = None) -> list[str]:
    """The texts of one shard, in file order, up to about `limit_bytes` of them."""
    texts, size = [], 0
    with lzma.open(path, "rt", encoding="utf8") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            size += len(texts[-1])
            if limit_bytes is not None and size >= limit_bytes:
                break
    return texts


def read_validation(data: Path) -> dict[str, list[str]]:
    """The held-out texts by source."""
    texts: dict[str, list[str]] = {}
    with lzma.open(data / "valid.jsonl.xz", "rt", encoding="utf8") as lines:
        for line in lines:
            document = json.loads(line)
            texts.setdefault(document["src"], []).append(document["text"])
    return texts


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer whose first ids are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of another model, which must have as many tokens as this one."""
    tokenizer = Tokenizer.from_file(str(path))
    if (size := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(f"{path} has {size} tokens, the model {vocab_size}: give a tokenizer of that size")
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a document."""
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    assert end_id is not None, f"the tokenizer lacks {END_OF_TEXT}"
    return int(end_id)


def loss_weights(source: str, text: str, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Loss weight of each token of a document, in tenths, one more for the end-of-text token: [n + 1] uint8."""
    weights = np.full(len(offsets) + 1, WEIGHT_SCALE, dtype=np.uint8)
    if source == "synthqa":
        answer = text.rindex(ANSWER_MARK if ANSWER_MARK in text else "Answer:") + len("Answer:")
        answer += 1 if ANSWER_MARK in text else 0
        in_answer = np.array([end > answer for _, end in offsets] + [False])
        weights = np.where(in_answer, ANSWER_WEIGHT, FACT_WEIGHT) * WEIGHT_SCALE
        weights[-1] = WEIGHT_SCALE
    return weights.astype(np.uint8)


def pack(source: str, texts: list[str], tokenizer: Tokenizer, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (uint16) and loss weights (uint8, tenths), both [N, width].

    Documents are joined by end-of-text. A generated question never continues in the next window, so each of their
    windows begins as a prompt does; longer texts flow on.
    """
    end = end_of_text_id(tokenizer)
    rows: list[np.ndarray] = []
    marks: list[np.ndarray] = []
    ids, weights = np.zeros(0, np.uint16), np.zeros(0, np.uint8)
    for start in range(0, len(texts), 1000):
        chunk = texts[start : start + 1000]
        for text, encoding in zip(chunk, tokenizer.encode_batch(chunk), strict=True):
            ids = np.concatenate((ids, np.array([*encoding.ids, end], np.uint16)))
            weights = np.concatenate((weights, loss_weights(source, text, encoding.offsets)))
            while len(ids) >= width:
                rows.append(ids[:width])
                marks.append(weights[:width])
                rest = len(ids) if source == "synthqa" else width
                ids, weights = ids[rest:], weights[rest:]
    if not rows:
        raise ValueError(f"source {source} has fewer than {width} tokens")
    return np.stack(rows), np.stack(marks)


def write_array(path: Path, array: np.ndarray) -> None:
    """Save an array under a temporary name, then rename it: a partial file is never taken for a whole one."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def prepare(
    data: Path, out: Path, vocab_size: int, seq_len: int, seed: int = 0, tokenizer_source: Path | None = None
) -> None:
    """Write `tokenizer.json` and the packed windows of every source under `out`; what is already there is kept.

    The tokenizer is that of another model, the file `tokenizer_source`, if given; else it is trained.
    """
    out.mkdir(parents=True, exist_ok=True)
    if (out / "tokenizer.json").exists() and all((out / f"{name}.weights.npy").exists() for name in MIXTURE):
        return
    texts = {name: read_texts(data / f"{name}.jsonl.xz", SOURCE_BYTES.get(name)) for name in MIXTURE}
    tokenizer_path = out / "tokenizer.json"
    if not tokenizer_path.exists():
        if tokenizer_source is None:
            tokenizer = train_tokenizer(tokenizer_sample(texts, seed), vocab_size)
        else:
            tokenizer = read_tokenizer(tokenizer_source, vocab_size)
        temporary = tokenizer_path.with_suffix(".tmp")
        tokenizer.save(str(temporary))
        temporary.replace(tokenizer_path)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    for name, documents in texts.items():
        if (out / f"{name}.weights.npy").exists():
            continue
        order = np.random.default_rng(seed).permutation(len(documents))
        ids, weights = pack(name, [documents[i] for i in order], tokenizer, seq_len + 1)
        write_array(out / f"{name}.ids.npy", ids)
        write_array(out / f"{name}.weights.npy", weights)


def tokenizer_sample(texts: dict[str, list[str]], seed: int) -> Iterator[str]:
    """Documents for the tokenizer: up to 3 MB a source in proportion to the mixture, so that simple text rules."""
    generator = np.random.default_rng(seed)
    for name, documents in texts.items():
        budget = int(10_000_000 * MIXTURE[name])
        for index in generator.permutation(len(documents)):
            yield documents[index]
            budget -= len(documents[index])
            if budget < 0:
                break


class Sampler:
    """Draws batches of windows from the sources; its state is small and restores the exact position."""

    def __init__(self, folder: Path, seed: int, mixture: dict[str, float] | None = None) -> None:
        mixture = MIXTURE if mixture is None else mixture
        self.names = list(mixture)
        self.share = np.array([mixture[name] for name in self.names]) / sum(mixture.values())
        self.ids = {name: np.load(folder / f"{name}.ids.npy", mmap_mode="r") for name in self.names}
        self.weights = {name: np.load(folder / f"{name}.weights.npy", mmap_mode="r") for name in self.names}
        self.seed = seed
        self.end_id = end_of_text_id(Tokenizer.from_file(str(folder / "tokenizer.json")))
        self.drawn = dict.fromkeys(self.names, 0)

    def _next_source(self) -> str:
        """The source furthest behind its share, so that every batch holds nearly the same mixture."""
        drawn = np.array([self.drawn[name] for name in self.names])
        return self.names[int(np.argmax(self.share * (drawn.sum() + 1) - drawn))]

    def _row(self, name: str) -> int:
        epoch, position = divmod(self.drawn[name], len(self.ids[name]))
        self.drawn[name] += 1
        order = np.random.default_rng((self.seed, self.names.index(name), epoch)).permutation(len(self.ids[name]))
        return int(order[position])

    def batch(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [rows, S + 1] int64 and loss weights [rows, S + 1] float32."""
        picks = [(name, self._row(name)) for name in (self._next_source() for _ in range(rows))]
        ids = np.stack([self.ids[name][row] for name, row in picks]).astype(np.int64)
        weights = np.stack([self.weights[name][row] for name, row in picks]).astype(np.float32) / WEIGHT_SCALE
        return ids, weights

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands."""
        return {"seed": self.seed, "drawn": dict(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.seed, self.drawn = state["seed"], dict(state["drawn"])
