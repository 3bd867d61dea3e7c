"""Where results may differ by rounding, a router may choose another expert of the same score; everything else that it
might do is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from smoe import from_pretrained
from smoe.kernels.isa import widest
from smoe.models.files import DEMO_FOLDER
from smoe.presets import configure
from smoe.report.verify import Report, reference_of, verify
from tests import promised

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
