"""One token through a whole model without the library's forward: the same bits, and the library's way for all else.

Would catch an embedding or logits that a family scales, a position one off, a mask, a hook or an output that somebody
has asked for and does not get.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from smoe.fastpath import token_pass
from smoe.kernels.spinning_pool import SpinningPool
from smoe.models.kv_cache import RowCache
from tests.fastpath.layers import IDS, MODELS, PROMPT, adopt, logits, model_of

TOKENS = IDS.shape[1] - PROMPT


def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every token that goes this way, proofs aside."""
    seen: list[int] = []
    original = token_pass.TokenPass._logits

    def noted(self: Any, ids: torch.Tensor, *more: Any) -> torch.Tensor:
        seen.append(int(ids))
        return original(self, ids, *more)

    monkeypatch.setattr(token_pass.TokenPass, "_logits", noted)
    return seen


@pytest.mark.parametrize("kind", MODELS)
def test_the_bits_are_the_librarys(kind: str, own_order: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(*MODELS[kind])
    layers = adopt(model, own_order)
    theirs = logits(model)
    assert token_pass.speed_up(model, layers)
    seen = passes(monkeypatch)
    assert all(map(torch.equal, logits(model), theirs))
    assert seen == IDS[0, PROMPT:].tolist()


def doubled(model: PreTrainedModel) -> None:
    original = model.forward
    model.forward = lambda **given: twice(original(**given))


def twice(output: Any) -> Any:
    output["logits"] = output.logits * 2
    return output


def scaled(model: PreTrainedModel) -> None:
    original = model.model.forward

    def forward(input_ids: torch.Tensor, **given: Any) -> Any:
        return original(inputs_embeds=model.model.embed_tokens(input_ids) * 2, **given)

    model.model.forward = forward


def with_more(model: PreTrainedModel) -> None:
    original = model.forward
    model.forward = lambda **given: more_of(original(**given))


def more_of(output: Any) -> Any:
    output["hidden_states"] = (output.logits,)
    return output


@pytest.mark.parametrize("change", [doubled, scaled, with_more])
def test_other_models_are_left_alone(change: Any, own_order: SpinningPool) -> None:
    model = model_of(*MODELS["norms of heads"])
    layers = adopt(model, own_order)
    change(model)
    assert not token_pass.speed_up(model, layers)


def test_every_layer_must_have_its_way(own_order: SpinningPool) -> None:
    model = model_of(*MODELS["norms of heads"])
    layers = adopt(model, own_order)
    layers.pop(model.model.layers[1])
    assert not token_pass.speed_up(model, layers)


@pytest.fixture
def adopted(own_order: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> tuple[PreTrainedModel, list[int]]:
    """A model, and the tokens that go this way."""
    model = model_of(*MODELS["norms of heads"])
    assert token_pass.speed_up(model, adopt(model, own_order))
    return model, passes(monkeypatch)


def test_what_is_asked_for_comes(adopted: tuple[PreTrainedModel, list[int]]) -> None:
    model, seen = adopted
    cache = RowCache(model.config, 1, 8)
    cache.begin(3, 1)
    model(input_ids=IDS[:, :3], past_key_values=cache)
    cache.commit()
    given = {"input_ids": IDS[:, 3:4], "past_key_values": cache}
    with torch.no_grad():
        plain = model(**given, position_ids=torch.tensor([[3]]), attention_mask=torch.ones(1, 4), logits_to_keep=1)
        assert not torch.equal(model(**given, position_ids=torch.tensor([[5]])).logits, plain.logits)
        assert len(seen) == 2
        assert len(model(**given, output_hidden_states=True).hidden_states) == 3
        assert len(model(**given, output_router_logits=True).router_logits) == 2
        assert model(**given, labels=IDS[:, 3:4]).loss is not None
        assert isinstance(model(**given, return_dict=False), tuple)
        assert not torch.equal(model(**given, attention_mask=torch.tensor([[0, 1, 1, 1]])).logits, plain.logits)
        assert torch.equal(model(IDS[:, 3:4], past_key_values=cache).logits, plain.logits)
        model.config.output_router_logits = True
        assert len(model(**given).router_logits) == 2
        model.config.output_router_logits = False
    assert len(seen) == 2


def test_what_is_hooked_or_replaced_counts(adopted: tuple[PreTrainedModel, list[int]]) -> None:
    model, seen = adopted
    before, called = logits(model), []
    seen.clear()
    for module in (model.model, model.model.layers[1]):
        hook = module.register_forward_hook(lambda *_: called.append(1))
        logits(model)
        hook.remove()
    assert len(called) == 2 * (1 + TOKENS)
    model.model.norm = nn.Sequential(model.model.norm, nn.Identity())
    assert all(map(torch.equal, logits(model), before))
    assert not seen


def test_a_replaced_output_layer_is_used(adopted: tuple[PreTrainedModel, list[int]]) -> None:
    model, seen = adopted
    model.lm_head = nn.Linear(model.config.hidden_size, 7, bias=False).bfloat16()
    assert {each.shape[-1] for each in logits(model)} == {7}
    assert not seen


def test_a_hook_of_all_modules_is_called(adopted: tuple[PreTrainedModel, list[int]]) -> None:
    model, seen = adopted
    called: list[nn.Module] = []
    hook = register_module_forward_hook(lambda module, *_: called.append(module))
    logits(model)
    hook.remove()
    assert called.count(model.model.layers[0].self_attn.k_proj) == 1 + TOKENS
    assert not seen
