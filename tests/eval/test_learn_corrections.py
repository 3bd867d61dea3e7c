"""Learning corrections from a text: which tokens go where, what is reported. Counted again from a reference's routers.

Would catch: a layer's inputs paired with another's, recall on text that was learned from, a piece's first token given
the last one of the piece before, a second run that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.eval.learn_corrections import FittedCorrections, learn
from smoe.models.read_spec import read_spec
from smoe.prediction.correction import fitted
from tests import oracle

Open = Callable[..., PreTrainedModel]
IDS = torch.randint(3, 128, (1200,), generator=torch.Generator().manual_seed(0)).tolist()
HELD_OUT = slice(1080, 1200)


def learned_from(folder: Path, open_model: Open, ids: list[int]) -> tuple[FittedCorrections, int, list[int], list[int]]:
    model = open_model(folder, "half", prefetch="stacked-gates", prefetch_depth=1)
    read: list[int] = []
    pairs: list[int] = []
    found = learn(model, read_spec(str(folder), EngineConfig()), ids, read.append, pairs.append)
    return found, model.offload.context_tokens, read, pairs


def test_of_a_text_that_is_read(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen3_moe")
    found, context, read, pairs = learned_from(folder, open_model, IDS)
    assert sum(read) == found.tokens == len(IDS) and sum(pairs) == len(found.corrections) == 6
    assert [each.distance for each in found.judged] == [1, 2, 3]
    theirs, inputs, chosen = oracle.reference(folder), list[torch.Tensor](), list[torch.Tensor]()
    names = [name for name, _ in theirs.named_modules() if name.endswith("mlp.gate")]
    routers = [theirs.get_submodule(name) for name in names]
    hooks = [
        hook
        for router in routers
        for hook in (
            router.register_forward_hook(lambda _, given, __: inputs.append(given[0])),
            router.register_forward_hook(lambda _, __, output: chosen.append(output[-1])),
        )
    ]
    with torch.no_grad():
        for begin in range(0, len(IDS), context):
            theirs(torch.tensor([IDS[begin : begin + context]]))
    for hook in hooks:
        hook.remove()
    hidden = [torch.cat([each.reshape(-1, 64) for each in inputs[n :: len(routers)]]) for n in range(len(routers))]
    index = [torch.cat(chosen[n :: len(routers)]) for n in range(len(routers))]
    for each in found.judged:
        gates, corrected = [], []
        for layer in range(len(routers) - each.distance):
            after = layer + each.distance
            before = torch.cat([torch.zeros(1, 64), hidden[after][:-1]])
            before[::context] = 0  # a piece begins
            correction = found.corrections[layer, after]
            shift = torch.full((len(IDS), 1), 1.0)
            shift[::context] = 0
            guess = hidden[layer] @ correction.weight[:, :64].T + before @ correction.weight[:, 64:].T
            router, known = routers[after].weight.detach(), (hidden[layer][:960], before[:960], shift[:960, 0] > 0)
            again = fitted(*known, hidden[after][:960] @ router.T, router)
            assert torch.allclose(again.weight, correction.weight, atol=1e-4)
            guess += shift * correction.bias + (1 - shift) * correction.first_bias
            corrected.append(share_named(guess[HELD_OUT], index[after][HELD_OUT]))
            with torch.no_grad():
                named = routers[after](hidden[layer])[0]
            gates.append(share_named(named[HELD_OUT], index[after][HELD_OUT]))
        assert each.corrected == pytest.approx(sum(corrected) / len(corrected), abs=1e-3)
        assert each.next_gate == pytest.approx(sum(gates) / len(gates), abs=1e-3)
        assert each.corrected > each.next_gate
        assert 0 <= each.recall <= each.corrected <= 1 and 0 <= each.precision <= 1
    assert found.seconds_per_layer > 0


def share_named(logits: torch.Tensor, chosen: torch.Tensor) -> float:
    """Of the chosen [T, K], those among as many best of logits [T, E]."""
    best = logits.topk(chosen.shape[1], dim=-1).indices
    return (best.unsqueeze(2) == chosen.unsqueeze(1)).any(1).float().mean().item()


def test_the_same_text_teaches_the_same(toy: Callable[..., Path], open_model: Open) -> None:
    first, second = (learned_from(toy("mixtral"), open_model, IDS[:500])[0] for _ in range(2))
    for pair, correction in first.corrections.items():
        for ours, theirs in zip(correction, second.corrections[pair], strict=True):
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    assert first.judged == second.judged


def test_what_is_judged_was_not_learned_from(toy: Callable[..., Path], open_model: Open) -> None:
    """Other words at the end change what is reported, not what is learned."""
    first = learned_from(toy("mixtral"), open_model, IDS[:600])[0]
    second = learned_from(toy("mixtral"), open_model, IDS[:540] + IDS[700:760])[0]
    assert all(
        torch.equal(correction.weight, second.corrections[pair].weight)
        and correction[3:] == second.corrections[pair][3:]
        for pair, correction in first.corrections.items()
    )
    assert first.judged != second.judged


def test_too_little_is_refused(toy: Callable[..., Path], open_model: Open) -> None:
    with pytest.raises(ConfigError, match="`text` has 40 tokens, and at least 500 are needed"):
        learned_from(toy("mixtral"), open_model, IDS[:40])
