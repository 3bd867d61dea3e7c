"""Where results may differ by rounding, a router may choose another expert of the same score; everything else that it
might do is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe import from_pretrained
from smoe.kernels.isa import widest
from smoe.models.files import DEMO_FOLDER
from smoe.presets import configure
from smoe.report.verify import Report, _is_same_choice, reference_of, verify
from tests import gguf_toy, promised

PATH = "model.layers.3.mlp.gate"


def checked(change: Callable[[PreTrainedModel], None]) -> Report:
    promised.needs(widest() is not None, promised.MACHINE_CODE)
    config = configure(memory_bytes=24 << 20, kernels="own-order", context_tokens=64)
    model = from_pretrained("demo", memory="24MiB", kernels="own-order", context_tokens=64)
    change(model)
    found = verify(model, reference_of(str(DEMO_FOLDER), config, None, 8), torch.arange(8)[None], lambda _: None)
    model.offload.close()
    return found


def with_other_experts(model: PreTrainedModel) -> None:
    """Make a router choose the expert after each chosen one, with the weights of the chosen ones."""
    router = model.get_submodule(PATH)

    def other(module: Any, args: Any, output: Any) -> Any:
        logits, weights, index = output
        return logits, weights, (index + 1) % logits.shape[-1]

    router.register_forward_hook(other)


def equal_scores(model: PreTrainedModel) -> None:
    weight = model.get_submodule(PATH).weight
    with torch.no_grad():
        weight.copy_(weight[:1].expand_as(weight))


def test_own_order_differs_by_rounding_only() -> None:
    assert checked(lambda model: None).bad == []


def test_experts_of_equal_scores_may_be_exchanged() -> None:
    """The block is then compared with the same choice."""

    def change(model: PreTrainedModel) -> None:
        equal_scores(model)
        with_other_experts(model)

    report = checked(change)
    assert report.bad == [] and not report.is_exact


def test_experts_of_other_scores_may_not() -> None:
    report = checked(with_other_experts)
    assert {(one.layer, one.part) for one in report.bad} == {(3, "mlp.gate"), (3, "mlp")}


def with_one_expert_twice(model: PreTrainedModel) -> None:
    def other(module: Any, args: Any, output: Any) -> Any:
        logits, weights, index = output
        return logits, weights, index[:, :1].expand_as(index)

    model.get_submodule(PATH).register_forward_hook(other)


def test_one_expert_twice_is_found_among_equal_scores_too() -> None:
    def change(model: PreTrainedModel) -> None:
        equal_scores(model)
        with_one_expert_twice(model)

    assert (3, "mlp.gate") in {(one.layer, one.part) for one in checked(change).bad}


@pytest.mark.parametrize("index", [[[0, 4]], [[-1, 1]], [[1, 1]], [[2, 0]]])
def test_choices_outside_and_of_lower_scores_are_others(index: list[list[int]]) -> None:
    scores, theirs = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([[0, 1]])
    pairs = [(scores, scores), (theirs, theirs)]
    assert not _is_same_choice(torch.tensor(index), theirs, pairs, True)
    near = torch.tensor([[3.0, 2.0, 1.999, 0.0]]).bfloat16()
    assert _is_same_choice(torch.tensor([[0, 2]]), theirs, [(near, near), (theirs, theirs)], True)
    assert not _is_same_choice(torch.tensor([[0, 2]]), theirs, [(near, near), (theirs, theirs)], False)


def test_a_second_check_with_the_same_reference_is_as_good() -> None:
    """Low-precision copies are checked after the model, with the same modules of the library."""
    promised.needs(widest() is not None, promised.MACHINE_CODE)
    config = configure(memory_bytes=24 << 20, kernels="own-order", context_tokens=64)
    reference, ids = reference_of(str(DEMO_FOLDER), config, None, 8), torch.arange(8)[None]
    model = from_pretrained("demo", memory="24MiB", kernels="own-order", context_tokens=64)
    for _ in range(2):
        assert verify(model, reference, ids, lambda _: None).bad == []
    model.offload.close()


@pytest.mark.parametrize("experts", [32, 128])
def test_equal_logits_of_a_quantised_model_may_be_chosen_in_another_order(experts: int, tmp_path: Path) -> None:
    """Of so many logits in bf16, some are equal in most prompts."""
    promised.needs(widest() is not None, promised.MACHINE_CODE)
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M", num_experts=experts, head_dim=64)
    config = configure(memory_bytes=64 << 20, context_tokens=64, activations="dtype")
    model = from_pretrained(str(path), memory="64MiB", context_tokens=64, activations="dtype")
    ids = torch.randint(3, 100, (1, 32), generator=torch.Generator().manual_seed(0))
    report = verify(model, reference_of(str(path), config, None, 32), ids, lambda _: None)
    model.offload.close()
    assert report.bad == []
