"""What is recorded, against hooks on the unmodified transformers model.

Would catch: a trace that is shifted by a layer, a token or a step, logits of the prefetch's guesses, a choice that has
been substituted already, and a recording that changes what is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import EngineStateError, TraceError, UnsupportedModelError
from smoe.generation.library_batch import pad
from smoe.models.scoring import in_order
from smoe.policy.registry import make_eviction
from smoe.runtime.step import Step
from smoe.simulator.replay import replay
from smoe.trace.file import Trace
from smoe.trace.recorder import recording
from tests import oracle, zoo

Open = Callable[..., PreTrainedModel]
Toy = Callable[..., Path]
NEW_TOKENS = 6


def generate(model: PreTrainedModel, prompt: torch.Tensor = oracle.PROMPT, **more: Any) -> torch.Tensor:
    ids: torch.Tensor = model.generate(
        prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, **more
    )
    return ids


class Heard:
    """What the reference's own routers and experts say, layer by layer."""

    def __init__(self, model: PreTrainedModel, routers: dict[int, str]) -> None:
        self.logits: list[torch.Tensor] = []
        self.index: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []
        modules = dict(model.named_modules())
        for name in routers.values():
            modules[name].register_forward_hook(lambda _, __, output: self.logits.append(in_order(output)[0]))
            experts = modules[name.rpartition(".")[0] + ".experts"]
            experts.register_forward_pre_hook(self._take)

    def _take(self, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        self.index.append(args[1])
        self.weights.append(args[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "granitemoe", "minimax_m2", "phimoe"])
def test_a_trace_is_what_the_librarys_routers_say(
    family: str, dtype: torch.dtype, toy: Toy, open_model: Open, tmp_path: Path
) -> None:
    """At a fifth of the experts, with prefetch, whose guesses ask the same routers."""
    folder, path = toy(family, dtype=dtype), tmp_path / "a.trace"
    model, theirs = open_model(folder, "fifth", prefetch="next-gate"), oracle.reference(folder)
    with recording(model, path):
        ours = generate(model)
    heard = Heard(theirs, model.offload.anatomy.routers)
    assert torch.equal(ours, generate(theirs)), "recording changed the text"
    trace = Trace(path)
    rows, layers = trace.rows, zoo.sparse_layers(theirs)
    assert [layer.layer for layer in trace.header.layers] == list(layers)
    assert np.array_equal(rows["router_logits"], torch.cat(heard.logits).half().numpy())
    assert np.array_equal(rows["top_k_index"], torch.cat(heard.index).numpy())
    assert np.array_equal(rows["top_k_weights"], torch.cat(heard.weights).float().numpy())
    sizes = [oracle.PROMPT_TOKENS] + [1] * (NEW_TOKENS - 1)
    expected = [(n, layer, n > 0) for n, size in enumerate(sizes) for layer in layers for _ in range(size)]
    assert list(zip(rows["step"].tolist(), rows["layer"].tolist(), rows["phase"] == 1, strict=True)) == expected
    assert not rows["sequence"].any()


def test_after_recording_nobody_listens(toy: Toy, open_model: Open, tmp_path: Path) -> None:
    model = open_model(toy("mixtral"))
    with pytest.raises(ZeroDivisionError), recording(model, tmp_path / "a.trace"):
        with pytest.raises(EngineStateError, match="already"), recording(model, tmp_path / "b.trace"):
            pass
        raise ZeroDivisionError
    assert model.offload.executor.observers == [] and list(tmp_path.iterdir()) == []
    assert not any(module._forward_hooks for module in model.modules())


def test_rows_of_a_batch_and_their_padding(toy: Toy, open_model: Open, tmp_path: Path) -> None:
    """Each row's choices are those of the prompt alone; padding is "no expert"."""
    model = open_model(toy("qwen3_moe"), "half", max_sequences=2)
    prompts = [oracle.PROMPT[0].tolist(), oracle.PROMPT[0, :9].tolist()]
    batch = pad(prompts, 0)
    with recording(model, tmp_path / "both.trace"):
        model(batch.input_ids, attention_mask=batch.attention_mask)
    both = Trace(tmp_path / "both.trace").rows
    for number, ids in enumerate(prompts):
        with recording(model, tmp_path / "one.trace", replace=True) as recorder:
            recorder.number_from(5)
            model(torch.tensor([ids]))
        alone = Trace(tmp_path / "one.trace").rows
        found = both[(both["sequence"] == number) & (both["top_k_index"][:, 0] != zoo.EXPERTS)]
        assert np.array_equal(found["top_k_index"], alone["top_k_index"])
        np.testing.assert_allclose(found["router_logits"], alone["router_logits"], rtol=1e-2, atol=1e-2)
        assert (alone["sequence"] == 5).all()
    padded = both["top_k_index"] == zoo.EXPERTS
    assert padded.all(axis=1).sum() == padded.any(axis=1).sum() == 4 * (24 - 9)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("eviction", ["lru", "score"])
def test_a_replayed_trace_counts_what_the_engine_counted(
    eviction: str, rows: int, toy: Toy, open_model: Open, tmp_path: Path
) -> None:
    """Prompts of different lengths, two generations one after the other."""
    model = open_model(toy("qwen2_moe"), "half", max_sequences=rows, eviction=eviction, prefetch="none")
    engine = model.offload
    batch = pad([oracle.PROMPT[0, row * 5 :].tolist() for row in range(rows)], 0)
    with recording(model, tmp_path / "a.trace"), engine.recording() as live:
        for _ in range(2):
            generate(model, batch.input_ids, attention_mask=batch.attention_mask)
    trace = Trace(tmp_path / "a.trace")
    routings = trace.routings(with_scores=eviction == "score")
    assert [r._replace(scores=None) for r in routings] == [r._replace(scores=None) for r in live]
    counts = replay(routings, engine.ledger.cache_slots, engine.ledger.staging_slots, make_eviction(eviction))
    counted = engine.stats()
    assert (counts.uses, counts.uses - counts.misses) == (counted.decode_uses, counted.decode_hits)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "lfm2_moe"])
def test_scores_are_the_engines_but_for_rounding(family: str, toy: Toy, open_model: Open, tmp_path: Path) -> None:
    """Recorded by an engine that needs no scores, made from logits; against those that live policies get."""
    exact, scored = open_model(toy(family)), open_model(toy(family), eviction="score")
    with recording(exact, tmp_path / "a.trace"):
        generate(exact, torch.cat([oracle.PROMPT, oracle.PROMPT], dim=1))  # longer than LAST_TOKENS
    with scored.offload.recording() as live:
        generate(scored, torch.cat([oracle.PROMPT, oracle.PROMPT], dim=1))
    for ours, theirs in zip(Trace(tmp_path / "a.trace").routings(with_scores=True), live, strict=True):
        assert ours.top_k_index == theirs.top_k_index
        ours_scores, theirs_scores = np.array(ours.scores), np.array(theirs.scores)
        is_close = np.isclose(ours_scores, theirs_scores, rtol=5e-3, atol=1e-4)  # two groups may be as good
        assert ours_scores.shape == theirs_scores.shape and is_close.mean() > 0.99


def test_the_choice_is_recorded_before_substitution(toy: Toy, open_model: Open, tmp_path: Path) -> None:
    model = open_model(toy("qwen3_moe"), "fifth", alpha=0.9, eviction="score", prefetch="none")
    with recording(model, tmp_path / "a.trace"):
        generate(model)
    assert model.offload.stats().substituted > 0
    trace = Trace(tmp_path / "a.trace")
    best = np.argsort(-trace.rows["router_logits"].astype(np.float32), axis=1, kind="stable")[:, :2]
    same = (np.sort(best) == np.sort(trace.rows["top_k_index"])).all(axis=1)
    assert same.mean() > 0.99 and trace.header.alpha == 0.9


def test_a_pass_that_failed_is_not_in_the_trace(
    toy: Toy, open_model: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in its second layer, then the same again: as if nothing had happened."""
    model = open_model(toy("mixtral"), "half")
    with recording(model, tmp_path / "whole.trace"):
        generate(model)
    original, calls = model.offload.executor.run, []

    def interrupted(step: Step) -> torch.Tensor:
        calls.append(step.layer)
        if len(calls) in (2, 10):
            raise KeyboardInterrupt
        return original(step)

    monkeypatch.setattr(model.offload.passes, "_answer", interrupted)
    with recording(model, tmp_path / "again.trace") as recorder:
        with pytest.raises(KeyboardInterrupt):
            model(oracle.PROMPT)
        model(oracle.PROMPT)
        with pytest.raises(KeyboardInterrupt):
            model(oracle.PROMPT)
    assert recorder.steps == 1
    whole, again = Trace(tmp_path / "whole.trace").rows, Trace(tmp_path / "again.trace").rows
    assert np.array_equal(again, whole[: 4 * oracle.PROMPT_TOKENS])


def test_an_unknown_rule_leaves_the_logits(toy: Toy, open_model: Open, tmp_path: Path) -> None:
    model = open_model(toy("phimoe"))
    with recording(model, tmp_path / "a.trace"):
        generate(model)
    trace = Trace(tmp_path / "a.trace")
    assert all(layer.rule is None for layer in trace.header.layers)
    assert replay(trace.routings(), 16, 2, make_eviction("lru")).uses > 0
    with pytest.raises(TraceError, match="phimoe"):
        trace.routings(with_scores=True)


def test_routers_that_cannot_be_heard_are_refused(
    toy: Toy, open_model: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not found, silent, or speaking of something else: no file in any case."""
    model = open_model(toy("mixtral"))
    engine = model.offload
    anatomy = engine.anatomy
    without = {layer: name for layer, name in anatomy.routers.items() if layer != 2}
    monkeypatch.setattr(engine, "anatomy", dataclasses.replace(anatomy, routers=without))
    with pytest.raises(UnsupportedModelError, match="layer 2 could not be found"), recording(model, tmp_path / "a"):
        pass
    monkeypatch.setattr(engine, "anatomy", anatomy)
    for said in (lambda logits: None, lambda logits: logits[:, :3]):
        note = engine.passes.note_logits
        monkeypatch.setattr(engine.passes, "note_logits", lambda layer, logits, s=said, n=note: n(layer, s(logits)))
        with pytest.raises(UnsupportedModelError, match="cannot be recorded"), recording(model, tmp_path / "a"):
            generate(model)
        monkeypatch.setattr(engine.passes, "note_logits", note)
    with pytest.raises(UnsupportedModelError, match="2 values"):
        in_order((torch.zeros(1, 2), torch.zeros(1, 2)))
    assert list(tmp_path.iterdir()) == []
