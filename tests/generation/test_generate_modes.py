"""The model stays the library's: everything built on `generate` works and gives what the unmodified model gives.

Would catch: a wrapped object in place of the library's class, a cache that beam search cannot reorder, a global
generator that loading or planning has moved on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

from tests import oracle

Open = Callable[..., PreTrainedModel]
FAMILIES = ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"]


def generated(model: PreTrainedModel, **options: Any) -> Any:
    torch.manual_seed(123)
    return model.generate(
        oracle.PROMPT, return_dict_in_generate=True, **{"max_new_tokens": 12, "min_new_tokens": 12, **options}
    )


def test_class_is_the_library_s(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"))
    assert type(model) is MixtralForCausalLM
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any("experts" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_with_a_seed(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy(family)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "output_scores": True}
    ours, theirs = generated(open_model(folder, "fifth"), **options), generated(oracle.reference(folder), **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.scores, theirs.scores, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_beam_search(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy(family)
    options = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "output_scores": True}
    ours = generated(open_model(folder, "fifth", max_sequences=3), **options)
    theirs = generated(oracle.reference(folder), **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-5, atol=1e-6)


def test_several_samples_of_one_prompt(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("mixtral")
    options = {"do_sample": True, "num_return_sequences": 3}
    ours = generated(open_model(folder, "fifth", max_sequences=3), **options)
    assert ours.sequences.shape[0] == 3
    assert torch.equal(ours.sequences, generated(oracle.reference(folder), **options).sequences)


def test_hidden_states_and_attentions(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("mixtral")
    with torch.no_grad():
        ours = open_model(folder, "fifth")(oracle.PROMPT, output_hidden_states=True)
        theirs = oracle.reference(folder)(oracle.PROMPT, output_hidden_states=True)
    assert len(ours.hidden_states) == len(theirs.hidden_states) == 5
    assert all(torch.equal(a, b) for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True))


def test_stopping_criteria(toy: Callable[..., Path], open_model: Open) -> None:
    class AfterFive(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= oracle.PROMPT_TOKENS + 5)

    model = open_model(toy("mixtral"))
    tokens = model.generate(
        oracle.PROMPT, max_new_tokens=20, do_sample=False, stopping_criteria=StoppingCriteriaList([AfterFive()])
    )
    assert tokens.shape[1] == oracle.PROMPT_TOKENS + 5


def test_forward_without_cache_and_loss(toy: Callable[..., Path], open_model: Open) -> None:
    """As evaluation harnesses call it: no cache, labels, keyword or positional ids."""
    folder = toy("mixtral")
    model, theirs = open_model(folder, "minimum"), oracle.reference(folder)
    with torch.no_grad():
        expected = theirs(oracle.PROMPT, labels=oracle.PROMPT, use_cache=False)
    got = model(input_ids=oracle.PROMPT, labels=oracle.PROMPT, use_cache=False)
    assert torch.equal(got.loss, expected.loss)
    assert torch.equal(got.logits, expected.logits)
    assert got.past_key_values is None
    embeddings = model.get_input_embeddings()(oracle.PROMPT)
    assert torch.equal(model(inputs_embeds=embeddings, use_cache=False).logits, expected.logits)


def test_no_input_is_the_library_s_own_error(toy: Callable[..., Path], open_model: Open) -> None:
    with pytest.raises(ValueError, match="input_ids"):
        open_model(toy("mixtral"))()


def test_loading_and_generating_leave_the_global_generator_alone(toy: Callable[..., Path], open_model: Open) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    open_model(toy("mixtral"), "fifth").generate(oracle.PROMPT, max_new_tokens=4, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before)
