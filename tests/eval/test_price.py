"""The price of a threshold, against plain transformers and by hand.

Would catch: logits compared a token late, a cache that carries over from one threshold to the next, an interval that
does not know that both runs saw the same text, an interrupted run that begins anew or mixes two models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.eval import stepwise
from smoe.eval.paired_bootstrap import Change
from smoe.eval.price import Price, largest_within, price_of, sweep
from smoe.eval.questions import read_questions
from smoe.eval.stepwise import Quality
from smoe.eval.texts import read_documents
from tests import oracle

DOCUMENTS = [list(range(3, 40)), list(range(60, 20, -1))]


class Words:
    """A tokenizer whose tokens are characters."""

    eos_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1 + ord(c) % 60 for c in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def run(model: PreTrainedModel, alphas: list[float], folder: Path, **circumstances: Any) -> list[Any]:
    return sweep(model, Words(), alphas, DOCUMENTS, None, folder, circumstances, lambda _: lambda __: None)


def test_alpha_zero_has_the_perplexity_of_transformers(
    toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    folder = toy("qwen3_moe")
    (exact,) = run(open_model(folder, "half", eviction="score"), [0.0], tmp_path)
    plain = oracle.reference(folder)
    nats = tokens = 0.0
    for ids in DOCUMENTS:
        with torch.no_grad():
            log_p = plain(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        nats -= float(log_p.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).sum())
        tokens += len(ids) - 1
    assert exact.quality.tokens == tokens
    assert exact.quality.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert (exact.perplexity.value, exact.perplexity.low, exact.perplexity.high) == (0, 0, 0)
    assert (exact.quality.kl, exact.quality.top1_agreement, exact.quality.substituted) == (0, 1, 0)


def test_a_threshold_costs_and_buys(
    toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    model = open_model(toy("qwen3_moe"), "fifth", eviction="score", prefetch="none")
    exact, lossy = run(model, [0.9], tmp_path)
    assert lossy.quality.substituted > 0 < lossy.quality.kl
    assert lossy.quality.hit_ratio > exact.quality.hit_ratio
    assert lossy.quality.bytes_per_token < exact.quality.bytes_per_token
    assert lossy.perplexity.low <= lossy.perplexity.value <= lossy.perplexity.high


def test_an_interrupted_sweep_goes_on(
    toy: Callable[..., Path],
    open_model: Callable[..., PreTrainedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = open_model(toy("qwen3_moe"), "fifth", eviction="score", prefetch="none")
    whole = run(model, [0.4, 0.9], tmp_path / "whole")

    def measure(*args: Any) -> Quality:
        if args[2] == 0.9:
            raise KeyboardInterrupt
        return stepwise.measure(*args)

    with monkeypatch.context() as patched:
        patched.setattr("smoe.eval.price.measure", measure)
        with pytest.raises(KeyboardInterrupt):
            run(model, [0.4, 0.9], tmp_path / "halves")
    done: list[float] = []

    def counting(*args: Any) -> Quality:
        done.append(args[2])
        return stepwise.measure(*args)

    monkeypatch.setattr("smoe.eval.price.measure", counting)
    halves = run(model, [0.4, 0.9], tmp_path / "halves")
    assert done == [0.9]
    assert [p.quality.kl for p in halves] == [p.quality.kl for p in whole]
    assert [p.quality.block_nats for p in halves] == [p.quality.block_nats for p in whole]
    with pytest.raises(ConfigError, match="another name: None then, 'another' now"):
        run(model, [0.4], tmp_path / "halves", name="another")


def test_the_interval_is_of_the_difference() -> None:
    """Two texts of very different difficulty, each a fiftieth harder: no uncertainty at all."""
    base = Quality(0.0, 128, [64.0, 320.0], [64, 64])
    worse = Quality(0.3, 128, [64.0 * 1.02, 64.0 * 0.02 + 320.0], [64, 64])
    change = price_of(worse, base).perplexity
    assert change.value == pytest.approx(math.expm1(0.02))
    assert change.high - change.low < 1e-9


def test_accuracy_is_compared_question_by_question() -> None:
    base = Quality(0.0, 1, [1.0], [1], right=[True] * 50 + [False] * 50)
    same = Quality(0.3, 1, [1.0], [1], right=[True] * 50 + [False] * 50)
    worse = Quality(0.3, 1, [1.0], [1], right=[True] * 40 + [False] * 60)
    unchanged, lost = price_of(same, base).accuracy, price_of(worse, base).accuracy
    assert unchanged is not None
    assert lost is not None
    assert (unchanged.value, unchanged.low, unchanged.high) == (0, -0.03, 0.03), "the rule of three"
    assert lost.value == pytest.approx(-0.1)
    assert -0.18 < lost.low < -0.1 < lost.high < -0.03


def test_the_demos_own_texts() -> None:
    assert len(read_documents(None)) == 30
    assert len(read_questions(None)) == 300


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{", r"line 1 of .* is no JSON \(.*\); every line must be a JSON object"),
        ("a.jsonl", "[1]", "no JSON object; every line must be one"),
        ("a.jsonl", '{"body": "x"}', "has no text; every line must have"),
        ("a.txt", " ", "is empty; give a file with some text"),
        ("a.txt", "caf\udce9", "cannot read `text=.*`: its byte 3 is not UTF-8; give a file with text in UTF-8"),
        ("missing.txt", None, "cannot read `text=.*`: No such file or directory; give a file"),
    ],
)
def test_bad_texts_are_refused(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode("utf8", "surrogateescape"))
    with pytest.raises(ConfigError, match=message) as error:
        read_documents(path)
    assert error.value.facts == error.value.facts | {"setting": "text", "given": str(path)}
    with pytest.raises(ConfigError, match=message.replace("`text=", "`prompt_file=")) as error:
        read_documents(path, "prompt_file")
    assert error.value.facts["setting"] == "prompt_file"


def test_the_largest_alpha_within_a_price() -> None:
    """By the upper bound, which need not rise with alpha."""
    highs = {0.0: 0.0, 0.2: 0.012, 0.4: 0.01, 0.6: 0.03}
    prices = [Price(Quality(alpha), Change(0.0, -0.01, high), None) for alpha, high in highs.items()]
    chosen = [largest_within(prices, allowed).quality.alpha for allowed in (0.001, 0.01, 0.02, 0.03)]
    assert chosen == [0.0, 0.4, 0.4, 0.6]
