"""Rows of a batch whose text has ended: they wait for the others, and ask for nothing.

Would catch: experts that are loaded for padding behind an end token, an ended row that counts for eviction, scores or
substitution, and outputs of the other rows that change by a bit because of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from smoe.models.kv_cache import RowCache
from tests import oracle

Open = Callable[..., PreTrainedModel]
Toy = Callable[..., Path]
END = 2
STEPS = 10
IDS = torch.randint(3, 128, (3, 12), generator=torch.Generator().manual_seed(3))


class EndAt(LogitsProcessor):  # type: ignore[misc]
    """Row r takes the end token as its token number ends[r] (from 1), and never elsewhere."""

    def __init__(self, *ends: int, prompt: int = IDS.shape[1]) -> None:
        self.ends, self.prompt = ends, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self.prompt + 1
        scores = scores.clone()
        scores[:, END] = -float("inf")
        for row, end in enumerate(self.ends):
            if step == end:
                scores[row] = -float("inf")
                scores[row, END] = 0
        return scores


def run(model: PreTrainedModel, ids: torch.Tensor, *ends: int, **more: Any) -> Any:
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": END, "pad_token_id": 0, **more}
    torch.manual_seed(5)
    return model.generate(ids, logits_processor=LogitsProcessorList([EndAt(*ends, prompt=ids.shape[1])]), **options)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_the_tensor_is_the_library_s(family: str, options: dict[str, Any], toy: Toy, open_model: Open) -> None:
    folder = toy(family)
    model = open_model(folder, "fifth", max_sequences=3)
    ours, theirs = run(model, IDS, 1, 6, 99, **options), run(oracle.reference(folder), IDS, 1, 6, 99, **options)
    assert torch.equal(ours, theirs)
    assert (ours[0, IDS.shape[1] + 1 :] == 0).all()


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
@pytest.mark.parametrize("eviction", ["lru", "score"])
def test_an_ended_row_uses_and_counts_for_nothing(prefetch: str, eviction: str, toy: Toy, open_model: Open) -> None:
    """After the prompt, two of three rows end at once: what follows is what the third has alone."""
    model = open_model(toy("qwen2_moe"), "fifth", max_sequences=3, prefetch=prefetch, eviction=eviction)
    engine = model.offload

    def decode(ids: torch.Tensor, *ends: int) -> tuple[list[Any], Any]:
        engine.use_alpha(0.0)  # a cold cache, and counters at zero
        with engine.recording() as trace:
            run(model, ids, *ends)
        steps = [step for step in trace if step.phase.value == "decode"]
        return steps, engine.stats()

    batch, together = decode(IDS, 1, 1, 99)
    alone, single = decode(IDS[2:], 99)
    assert len(batch) == len(alone) == 4 * (STEPS - 1)
    for step, one in zip(batch, alone, strict=True):
        (row,) = one.top_k_index
        nothing = [step.experts] * len(row)
        assert [list(each) for each in step.top_k_index] == [nothing, nothing, list(row)]
    assert together.decode_uses == single.decode_uses
    assert together.tokens - single.tokens == 2 * IDS.shape[1]


def test_loads_are_those_of_the_row_that_is_left(toy: Toy, open_model: Open) -> None:
    """The same prompt in both rows, so that both decode from the same slots."""
    model = open_model(toy("qwen2_moe"), "minimum", max_sequences=2, prefetch="none")
    engine = model.offload

    def decode(rows: int, *ends: int) -> tuple[int, int]:
        engine.use_alpha(0.0)
        marks = []

        class Mark(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                marks.append(engine.stats())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        run(model, IDS[:1].repeat(rows, 1), *ends, stopping_criteria=StoppingCriteriaList([Mark()]))
        after_prompt = engine.stats() - marks[0]
        return after_prompt.loads, after_prompt.decode_hits

    assert decode(2, 99, 1) == decode(1, 99)


def test_the_other_rows_keep_their_values(toy: Toy, open_model: Open) -> None:
    """Bit for bit at every budget; beside a generation in which ended rows are computed, up to rounding, as the number
    of rows in an expert's product decides the last bits of each."""
    folder, kept = toy("qwen3_moe", hidden_size=256, moe_intermediate_size=64), list[list[torch.Tensor]]()
    for budget, is_whole in (("full", False), ("minimum", False), ("half", True)):
        model, keep = open_model(folder, budget, max_sequences=3), list[torch.Tensor]()
        kept.append(keep)

        class Keep(LogitsProcessor):  # type: ignore[misc]
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                keep.append(scores[2:].clone())  # noqa: B023
                return scores

        model.generate(
            IDS,
            max_new_tokens=STEPS,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=0,
            return_dict_in_generate=is_whole,  # then the caller may look at ended rows, and they are computed
            logits_processor=LogitsProcessorList([Keep(), EndAt(1, 3, 99)]),
        )
    full, minimum, whole = kept
    assert len(full) == len(minimum) == len(whole) == STEPS
    assert all(torch.equal(a, b) for a, b in zip(full, minimum, strict=True))
    assert all(oracle.relative_error(a, b) <= 1e-5 for a, b in zip(full, whole, strict=True))


def test_substitution_asks_the_rows_that_go_on(toy: Toy, open_model: Open) -> None:
    model = open_model(toy("qwen3_moe"), "fifth", max_sequences=3, alpha=0.6, prefetch="none")
    before = model.offload.stats()
    run(model, IDS, 1, 1, 99)
    counted = model.offload.stats() - before
    layers, top_k = 4, 2
    assert counted.routes == layers * top_k * (STEPS - 1)
    model.offload.executor.table.check()


@pytest.mark.parametrize(
    "options",
    [
        {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
        {"return_dict_in_generate": True, "output_hidden_states": True},
    ],
    ids=["scores", "states"],
)
def test_who_looks_at_ended_rows_sees_the_library_s(options: dict[str, Any], toy: Toy, open_model: Open) -> None:
    folder = toy("mixtral")
    ours, theirs = (
        run(model, IDS, 1, 6, 99, **options)
        for model in (open_model(folder, "fifth", max_sequences=3), oracle.reference(folder))
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(ours.get(name) or (), theirs.get(name) or (), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(ours.get("hidden_states") or (), theirs.get("hidden_states") or (), strict=True):
        torch.testing.assert_close(a[-1], b[-1], rtol=1e-4, atol=1e-5)


class RowStops(StoppingCriteria):  # type: ignore[misc]
    """The first row is done after two tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool)
        done[0] = input_ids.shape[1] >= IDS.shape[1] + 2
        return done


@pytest.mark.parametrize("has_end", [True, False])
def test_the_caller_s_own_criteria(has_end: bool, toy: Toy, open_model: Open) -> None:
    """Without an end token the library goes on writing rows that are done: then they are computed."""
    folder = toy("qwen2_moe")
    model = open_model(folder, "fifth", max_sequences=3, prefetch="none")
    end = {"eos_token_id": END, "pad_token_id": 0} if has_end else {"eos_token_id": None}

    def tokens(of: PreTrainedModel) -> torch.Tensor:
        if not has_end:
            of.generation_config.eos_token_id = None
        criteria = StoppingCriteriaList([RowStops()])
        processors = LogitsProcessorList([EndAt()])
        return of.generate(
            IDS, max_new_tokens=STEPS, do_sample=False, stopping_criteria=criteria, logits_processor=processors, **end
        )

    with model.offload.recording() as trace:
        ours = tokens(model)
    assert torch.equal(ours, tokens(oracle.reference(folder)))
    last = trace[-1]
    assert (last.top_k_index[0][0] == last.experts) is has_end
    assert bool((ours[0, IDS.shape[1] + 2 :] == 0).all()) is has_end


def test_several_samples_and_the_next_generation(toy: Toy, open_model: Open) -> None:
    """Nothing of an ended row is remembered, whether the generation ends well or by an error."""
    folder = toy("mixtral")
    model, theirs = open_model(folder, "fifth", max_sequences=3), oracle.reference(folder)
    options = {"num_return_sequences": 3, "do_sample": True}
    assert torch.equal(run(model, IDS[:1], 1, 4, 99, **options), run(theirs, IDS[:1], 1, 4, 99, **options))

    class FailsError(Exception):
        pass

    class Fail(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            if input_ids.shape[1] > IDS.shape[1] + 4:
                raise FailsError
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    with pytest.raises(FailsError):
        run(model, IDS, 1, 99, 99, stopping_criteria=StoppingCriteriaList([Fail()]))
    assert torch.equal(run(model, IDS, 99, 5, 2), run(theirs, IDS, 99, 5, 2))


def test_a_pass_of_the_caller_s_own_is_whole(toy: Toy, open_model: Open) -> None:
    """A callback that asks the model something else, with as many rows: that has no ended rows."""
    model = open_model(toy("mixtral"), "fifth", max_sequences=3)
    expected = model(IDS, use_cache=False).logits
    seen: list[torch.Tensor] = []

    class Ask(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            seen.append(model(IDS, use_cache=False).logits)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    run(model, IDS, 1, 1, 99, stopping_criteria=StoppingCriteriaList([Ask()]))
    assert len(seen) == STEPS and all(torch.equal(logits, expected) for logits in seen)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}])
def test_beams_are_left_alone(options: dict[str, Any], toy: Toy, open_model: Open) -> None:
    folder = toy("mixtral")
    more = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": END, "pad_token_id": 0, **options}
    ours = open_model(folder, "fifth", max_sequences=3).generate(IDS[:1], **more)
    assert torch.equal(ours, oracle.reference(folder).generate(IDS[:1], **more))


def test_a_cache_of_the_caller_s_holds_what_the_library_s_would(toy: Toy, open_model: Open) -> None:
    """It goes on living: its ended rows are computed as ever."""
    model = open_model(toy("mixtral"), "fifth", max_sequences=3)
    cache = model.offload.new_cache(3)
    with model.offload.recording() as trace:
        run(model, IDS, 1, 1, 99, past_key_values=cache)
    assert isinstance(cache, RowCache) and cache.length == IDS.shape[1] + STEPS - 1
    assert all(expert != step.experts for step in trace for row in step.top_k_index for expert in row)
