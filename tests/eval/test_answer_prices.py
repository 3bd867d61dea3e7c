"""The prices of answers, against plain transformers and where they are known.

Would catch: the change of another route than the one it is priced by, a price of the wrong sign or layer, rounding
taken for a price, low copies that are not what is computed, prices that do not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from smoe.errors import ConfigError, UnsupportedModelError
from smoe.eval.answer_prices import AnswerPrices, RouteTrial, measure, passes_of, shape_of
from smoe.eval.texts import read_documents
from smoe.load.priced_answers import prices_of as prices_of_model
from smoe.models.checkpoint import whole_checkpoint
from smoe.models.files import DEMO_FOLDER
from smoe.policy.prices import LayerPrices, Resolution
from tests import oracle, zoo
from tests.packs import pack_folder

Open = Callable[..., PreTrainedModel]
IDS = [3 + 7 * n % 120 for n in range(200)]
WIDTH = 32
SMALL: dict[str, Any] = {"context_tokens": WIDTH, "max_sequences": 4, "eviction": "score", "prefetch": "none"}


def prices_of(model: PreTrainedModel, trials: int = 1, ids: list[int] = IDS) -> AnswerPrices:
    return measure(model, ids, lambda _: None, trials)


def test_a_pass_has_the_rows_that_a_step_has_room_for(toy: Callable[..., Path], open_model: Open) -> None:
    engine = open_model(toy("qwen3_moe"), "half", **SMALL).offload
    assert shape_of(engine, IDS) == (4, 32)
    assert passes_of(engine, IDS, 2) == 8, "2 x 4 layers x (left out, substituted, last bits), three in a pass"
    done: list[int] = []
    measure(engine_model := open_model(toy("qwen3_moe"), "half", **SMALL), IDS, done.append, 2)
    assert len(done) == 8 and engine_model.offload.stats().forward_passes == 8


@torch.no_grad()
def test_leaving_out_costs_what_transformers_says(toy: Callable[..., Path], open_model: Open) -> None:
    """Two experts a token: which one is left out is no matter of chance. One pass: four layers in turn."""
    folder = toy("qwen3_moe")
    found = prices_of(open_model(folder, "half", **{**SMALL, "max_sequences": 13}))
    model, ids = oracle.reference(folder), torch.tensor([IDS[:WIDTH]])
    exact = model(ids).logits[0].log_softmax(-1)
    for layer in found.table.layers:
        units, changes = [], []

        def leave_out(
            experts: torch.nn.Module,
            args: tuple[torch.Tensor, ...],
            output: torch.Tensor,
            units: list[float] = units,
            changes: list[float] = changes,
        ) -> torch.Tensor:
            hidden, index, weights = args
            units.append(float((weights.min(-1).values / weights.sum(-1))[1:].pow(2.5).sum()))
            weights = weights.clone()
            weights[1:] = weights[1:].scatter(-1, weights[1:].argmin(-1, keepdim=True), 0.0)
            changed: torch.Tensor = type(experts).forward(experts, hidden, index, weights)
            changes.append(float((changed - output).square().sum()))
            return changed

        hook = model.model.layers[layer].mlp.experts.register_forward_hook(leave_out)
        changed = model(ids).logits[0].log_softmax(-1)
        hook.remove()
        nats = float((exact.exp() * (exact - changed)).sum())
        shown = found.shown[RouteTrial(layer, Resolution.SKIP)]
        assert shown.nats == pytest.approx([nats], rel=1e-3), layer
        assert shown.units == pytest.approx(units, rel=1e-4) and shown.changes == pytest.approx(changes, rel=1e-3)
        bits = found.shown[RouteTrial(layer, None)]
        assert abs(bits.nats[0]) < 1e-8 * nats and 0 < bits.changes[0] < 1e-6 * changes[0]


def test_a_table_is_made_of_one_factor_for_each_layer(toy: Callable[..., Path], open_model: Open) -> None:
    found = prices_of(open_model(toy("qwen3_moe", dtype=torch.bfloat16), "half", **SMALL), trials=2)
    for layer, prices in found.table.layers.items():
        skip, other, bits = (found.shown[RouteTrial(layer, a)] for a in (Resolution.SKIP, Resolution.SUBSTITUTE, None))
        assert len(skip.nats) == len(other.nats) == len(bits.nats) == 2
        by_rounding = sum(bits.nats) / 2
        assert by_rounding > 1e-5 * sum(skip.nats), "16 bits: it counts"
        assert found.rounding[layer] == pytest.approx(by_rounding / WIDTH)
        factor = (sum(skip.nats + other.nats) - 4 * by_rounding) / sum(skip.changes + other.changes)
        assert prices.skip == pytest.approx(factor * sum(skip.changes) / sum(skip.units))
        assert prices.substitute == pytest.approx(factor * sum(other.changes) / sum(other.units))
        assert 0 < found.errors.layers[layer].skip < 2 * prices.skip


def test_experts_of_zeros_cost_nothing_to_replace(tmp_path: Path, open_model: Open) -> None:
    folder = rewritten(tmp_path, lambda weight: torch.zeros_like(weight))
    found = prices_of(open_model(folder, "half", **SMALL))
    for prices in found.table.layers.values():
        assert prices == pytest.approx(LayerPrices(0.0, 0.0, 0.0), abs=1e-9)


def test_a_low_copy_that_is_the_same_costs_nothing(tmp_path: Path, open_model: Open) -> None:
    """Two values to a group: four bits have them exactly."""
    same = rewritten(tmp_path / "same", lambda weight: weight.sign() * 0.125)
    pack_folder(same, precision="int4")
    found = prices_of(open_model(same, "half", **SMALL, low_precision="int4"))
    assert all(prices.low < 1e-6 * prices.skip for prices in found.table.layers.values()), found
    others = zoo.save("qwen3_moe", tmp_path / "others")
    pack_folder(others, precision="int4")
    wide = {**SMALL, "max_sequences": 17}  # one pass: all trials on the same window
    found = prices_of(open_model(others, "half", **wide, low_precision="int4"))
    assert all(1e-3 * prices.skip < prices.low < 0.1 * prices.skip for prices in found.table.layers.values()), found
    without = prices_of(open_model(others, "half", **wide))
    for layer in found.table.layers:
        left_out = RouteTrial(layer, Resolution.SKIP)
        assert found.shown[left_out].nats == pytest.approx(without.shown[left_out].nats, rel=1e-4), (
            "own copies otherwise"
        )


def test_without_low_copies_they_are_priced_like_none(toy: Callable[..., Path], open_model: Open) -> None:
    found = prices_of(open_model(toy("mixtral"), "half", **SMALL))
    assert not found.has_low and all(prices.low == prices.skip > 0 for prices in found.table.layers.values())


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "minimax_m2", "qwen2_moe", "granitemoe"])
def test_families_can_be_priced(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    """Groups, biases, weights that are no shares, logits that are scaled."""
    found = prices_of(open_model(toy(family), "half", **SMALL))
    for layer, prices in found.table.layers.items():
        assert 0 < prices.skip < 100 and 0 < prices.substitute < 100, (layer, prices)


@torch.no_grad()
def test_the_demos_prices_add_up_in_all_layers_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plain transformers, other text than the prices are from: every token's two least experts left out everywhere.
    Within a factor of 1.6."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    priced, tokenizer = prices_of_model(DEMO_FOLDER), whole_checkpoint("demo", None).tokenizer()
    assert priced is not None
    model, nats = oracle.reference(DEMO_FOLDER, torch.float32), [0.0]
    ids = torch.tensor([tokenizer("\n\n".join(read_documents(None)))["input_ids"][:256]])
    exact = model(ids).logits[0].log_softmax(-1)

    def answer(layer: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        def hook(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden, index, weights = args
            price = priced.table.layers[layer].price
            weights = weights.clone()
            nats[0] += sum(price(Resolution.SKIP, weight) for weight in weights[:, 6:].flatten().tolist())
            weights[:, 6:] = 0.0
            return hidden, index, weights

        return hook

    for layer in priced.table.layers:
        model.model.layers[layer].mlp.experts.register_forward_pre_hook(answer(layer))
    changed = model(ids).logits[0].log_softmax(-1)
    measured = float((exact.exp() * (exact - changed)).sum())
    assert 0.001 < measured / ids.shape[1] < 0.02, "a change of a tenth to two per cent of perplexity"
    assert 1 / 1.6 < nats[0] / measured < 1.6


def test_what_cannot_be_priced_is_refused(toy: Callable[..., Path], open_model: Open) -> None:
    with pytest.raises(ConfigError, match="routers' scores"):
        prices_of(open_model(toy("qwen3_moe"), "half", eviction="lru", prefetch="none"))
    model = open_model(toy("qwen3_moe"), "half", **SMALL)
    with pytest.raises(ConfigError, match="`text` has 5 tokens"):
        prices_of(model, ids=IDS[:5])
    head = model.get_output_embeddings()
    with pytest.raises(UnsupportedModelError, match="not the result of its output head"):
        hook = head.register_forward_hook(lambda _, args, output: output.tanh() if output.shape[1] == 1 else output)
        try:
            prices_of(model)
        finally:
            hook.remove()


def rewritten(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A toy checkpoint whose experts' weights are changed."""
    zoo.save("qwen3_moe", folder)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        changed = {key: change(w).contiguous() if ".experts." in key else w for key, w in weights.items()}
        save_file(changed, file, metadata={"format": "pt"})
    return folder
