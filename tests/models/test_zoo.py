"""The toy models themselves: if one of these fails, no other test on them means anything."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests import zoo

torch.set_num_threads(1)
TOKENS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(7))

FUSED_KEYS = {
    "gpt_oss": [
        "model.layers.{layer}.mlp.experts.gate_up_proj",
        "model.layers.{layer}.mlp.experts.gate_up_proj_bias",
        "model.layers.{layer}.mlp.experts.down_proj",
        "model.layers.{layer}.mlp.experts.down_proj_bias",
    ],
    "granitemoe": [
        "model.layers.{layer}.block_sparse_moe.input_linear.weight",
        "model.layers.{layer}.block_sparse_moe.output_linear.weight",
    ],
}


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    output: torch.Tensor = model(TOKENS).logits
    return output


def test_families_are_the_eighteen_we_promise() -> None:
    promised = """
        mixtral qwen2_moe qwen3_moe olmoe phimoe deepseek_v2 deepseek_v3 gpt_oss glm4_moe minimax_m2 ernie4_5_moe
        granitemoe qwen3_next dots1 hunyuan_v1_moe lfm2_moe deepseek xverse
    """
    assert sorted(zoo.FAMILIES) == sorted(promised.split())


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_saved_model_has_the_published_keys_and_reloads_with_equal_logits(family: str, tmp_path: Path) -> None:
    model = zoo.make(family)
    expected = logits(model)
    assert expected.isfinite().all()
    assert 0.1 < expected.std() < 10, f"{family}: badly scaled weights, logits have std {expected.std():.3g}"

    folder = zoo.save(family, tmp_path, max_shard_size="200KB")
    keys = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])
    assert len(list(folder.glob("*.safetensors"))) > 1
    found = {key for key in keys if ".experts." in key or "_linear.weight" in key}
    layers = zoo.sparse_layers(model)
    assert layers
    if family in zoo.FUSED:
        assert found == {key.format(layer=layer) for layer in layers for key in FUSED_KEYS[family]}
    else:
        pairs = itertools.product(layers, range(zoo.EXPERTS))
        assert found == {key for layer, expert in pairs for key in zoo.expert_keys(family, layer, expert)}

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    reloaded, problems = loaded
    assert not any(problems.values()), problems
    assert torch.equal(logits(reloaded), expected)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_bias_sink_and_norm_is_felt(family: str) -> None:
    """Undoing any one kind of vector parameter in all layers changes the logits, so forgetting it is found out."""
    model = zoo.make(family)
    expected = logits(model)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kinds: dict[str, list[torch.Tensor]] = {}
    for name, tensor in named.items():
        if tensor.is_floating_point() and (name.endswith(("bias", "sinks")) or "norm" in name):
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            kinds.setdefault(kind, []).append(tensor)
    assert kinds
    for kind, tensors in kinds.items():
        before = [tensor.detach().clone() for tensor in tensors]
        for tensor in tensors:
            assert tensor.abs().max() > 0, f"{family}: {kind} is zero"
            tensor.data.copy_(tensor.data.round())  # a norm weight near 1 becomes 1, a bias near 0 becomes 0
        assert not torch.equal(logits(model), expected), f"{family}: {kind} does not matter"
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data.copy_(value)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_expert_is_chosen_somewhere(family: str) -> None:
    """Weights of experts that are never routed to would be tested by nobody."""
    model = zoo.make(family)
    chosen: dict[str, set[int]] = {}

    def note(name: str) -> object:
        return lambda _, args: chosen.setdefault(name, set()).update(args[1].unique().tolist())

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(note(name))
    with torch.no_grad():
        model(torch.randint(3, 128, (16, 16), generator=torch.Generator().manual_seed(7)))
    assert len(chosen) == len(zoo.sparse_layers(model))
    for name, experts in chosen.items():
        assert experts == set(range(zoo.EXPERTS)), f"{family}: {name} uses only {sorted(experts)}"


def test_make_depends_on_its_arguments_only() -> None:
    state = torch.get_rng_state()
    for family in ("qwen3_next", "mixtral"):  # with and without parameters that only the library sets
        first, again, other = (logits(zoo.make(family, seed=seed)) for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert zoo.make("mixtral", num_hidden_layers=2).config.num_hidden_layers == 2


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "minimax_m2", "xverse"])
def test_bf16_reloads_with_equal_logits(family: str, tmp_path: Path) -> None:
    """Including what the library keeps in fp32 inside a bf16 model."""
    model = zoo.make(family, dtype=torch.bfloat16)
    zoo.save(family, tmp_path, dtype=torch.bfloat16)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, experts_implementation="eager")
    dtypes = [{name: tensor.dtype for name, tensor in each.state_dict().items()} for each in (model, reloaded)]
    assert dtypes[0] == dtypes[1]
    assert torch.equal(logits(reloaded), logits(model))
