"""One row through a router by machine code: as the library routes, and only for routers and blocks that are proven.

Would catch a router that scales its weights or scores by a sigmoid, a block that adds a shared expert, a result that is
taken for another row, a router that was replaced after it was proven.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedModel

from smoe.bounds import INT8
from smoe.fastpath import attention, decoder_layer, linear, norm, router
from smoe.fastpath.fast_layer import FastLayer
from smoe.kernels.spinning_pool import SpinningPool
from tests.fastpath.layers import MODELS, logits, model_of

QWEN3 = (*MODELS["norms of heads"][:2], MODELS["norms of heads"][2] | {"num_experts": 48, "norm_topk_prob": True})
OLMOE: tuple[type, type, dict[str, Any]] = (
    OlmoeConfig, OlmoeForCausalLM, {"num_experts": 48, "num_experts_per_tok": 3, "norm_topk_prob": False},
)  # fmt: skip


def routed(model: PreTrainedModel, pool: SpinningPool) -> tuple[list[FastLayer], int]:
    """The model's decoder layers, all parts sped up, and how many of its routers have a way of their own."""
    gates = {each: True for name, each in model.named_modules() if name.endswith("mlp.gate")}
    experts = {each for name, each in model.named_modules() if name.endswith("mlp.experts")}
    norms = norm.speed_up(model)
    attention.speed_up(model, pool)
    linears = linear.speed_up(model, pool, gates, INT8, is_measured=False).parts
    layers = list(decoder_layer.speed_up(model, pool, linears, norms).values())
    return layers, len(router.speed_up(pool, gates, layers, experts))


@pytest.mark.parametrize("of", [QWEN3, OLMOE], ids=["qwen3_moe", "olmoe"])
def test_logits_are_the_librarys_up_to_rounding(of: Any, own_order: SpinningPool) -> None:
    model, theirs = model_of(*of), logits(model_of(*of))
    layers, count = routed(model, own_order)
    assert count == 2 and all(layer.may_skip_block() for layer in layers)
    scale = max(float(each.abs().max()) for each in theirs)
    for ours, wanted in zip(logits(model), theirs, strict=True):
        assert float((ours.float() - wanted.float()).abs().max()) < 0.03 * scale


def test_the_router_of_a_layers_work_is_that_of_its_own_forward(own_order: SpinningPool) -> None:
    """The same bits, whether attention's work has computed it or nothing has."""
    model = model_of(*QWEN3)
    (first, _), _ = routed(model, own_order)
    assert first.routed is not None
    seen: list[tuple[torch.Tensor, Any]] = []
    first.routed.gate.register_forward_hook(lambda _, args, output: seen.append((args[0].clone(), output)))
    logits(model)
    alone = [(x, output) for x, output in seen if x.shape[0] == 1]
    assert alone
    for x, output in alone:
        assert all(map(torch.equal, first.routed.gate.forward(x.clone()), output))


def test_several_rows_are_the_librarys(own_order: SpinningPool) -> None:
    model, untouched = model_of(*QWEN3), model_of(*QWEN3)
    routed(model, own_order)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    gates = [each.model.layers[0].mlp.gate for each in (model, untouched)]
    assert all(map(torch.equal, gates[0](x), gates[1](x)))


def scaled(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        original = layer.mlp.gate.forward
        layer.mlp.gate.forward = lambda x, original=original: (lambda a, b, c: (a, 2 * b, c))(*original(x))


def with_more(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        original = layer.mlp.forward
        layer.mlp.forward = lambda x, original=original: original(x) + x


def with_a_child(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.shared_expert = nn.Linear(128, 128).bfloat16()


@pytest.mark.parametrize(("change", "ways"), [(scaled, 0), (with_more, 2), (with_a_child, 2)])
def test_other_routers_and_blocks_are_left_alone(change: Any, ways: int, own_order: SpinningPool) -> None:
    model = model_of(*QWEN3)
    change(model)
    layers, count = routed(model, own_order)
    assert count == ways and len(layers) == 2
    assert not any(layer.may_skip_block() for layer in layers)


def test_what_was_replaced_or_has_a_hook_is_called(own_order: SpinningPool) -> None:
    (first, second), _ = routed(model_of(*QWEN3), own_order)
    assert first.may_skip_block() and second.may_skip_block()
    assert first.routed is not None
    handle = first.routed.experts.register_forward_hook(lambda *_: None)
    assert not first.may_skip_block()
    handle.remove()
    assert first.may_skip_block()
    second.block.gate = nn.Identity()
    assert not second.may_skip_block()
    first.routed.gate.weight = nn.Parameter(first.routed.gate.weight.detach().clone(), requires_grad=False)
    assert not first.may_skip_block(), "another weight, of which the job knows nothing"


def negate(module: nn.Module, args: tuple[torch.Tensor]) -> None:
    args[0].neg_()


def test_a_hook_that_changes_the_row_in_place_changes_the_routing(own_order: SpinningPool) -> None:
    """Would catch a result of the job that is taken for that of another row at the same address."""
    model = model_of(*QWEN3)
    (first, _), _ = routed(model, own_order)
    assert first.routed is not None
    gate, seen = first.routed.gate, list[tuple[torch.Tensor, Any]]()
    first.block.register_forward_pre_hook(negate)
    gate.register_forward_hook(lambda _, args, output: seen.append((args[0].clone(), output)))
    logits(model)
    for x, output in seen:
        if x.shape[0] == 1:
            assert all(map(torch.equal, gate.forward(x), output))
