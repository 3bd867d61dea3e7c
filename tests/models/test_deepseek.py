"""DeepSeekMoE 16B against a MoE block written out here from raw checkpoint tensors.

The checkpoint is written by the test under the published names, not by `save_pretrained`, so a wrong name, a swapped
gate and up, a forgotten shared expert or a wrong normalisation cannot cancel out between saving and loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

from smoe.errors import UnsupportedModelError
from smoe.models import deepseek, registration
from tests import zoo
from tests.models.published import (
    HIDDEN,
    TOKENS,
    VOCAB,
    Tensors,
    load,
    mlp,
    mlp_tensors,
    moe_tensors,
    publish,
    published_tensors,
)

torch.set_num_threads(1)

INNER, DENSE_INNER, EXPERTS, LAYERS = 32, 96, 8, 4

# The published keys of deepseek-moe-16b-base, at toy size.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekConfig",
        "AutoModel": "modeling_deepseek.DeepseekModel",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100,
    "eos_token_id": 101,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": DENSE_INNER,
    "max_position_embeddings": 256,
    "model_type": "deepseek",
    "moe_intermediate_size": INNER,
    "moe_layer_freq": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.36.0",
    "use_cache": True,
    "vocab_size": VOCAB,
}


def published_checkpoint(folder: Path, **overrides: Any) -> tuple[dict[str, Any], Tensors]:
    """Write config.json and model.safetensors as published."""
    config = {**PUBLISHED, **overrides}

    def block(index: int, layer: str) -> Tensors:
        if index < config["first_k_dense_replace"] or index % config["moe_layer_freq"]:
            return mlp_tensors(f"{layer}.mlp", DENSE_INNER)
        return moe_tensors(layer, "gate", EXPERTS, INNER, config["n_shared_experts"])

    tensors = published_tensors(LAYERS, block)
    publish(folder, config, tensors)
    return config, tensors


def moe_block(config: dict[str, Any], tensors: Tensors, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """Reference MoE block for one token `[H]`, in double precision: the paper's section 3.2, without the residual."""
    prefix = f"model.layers.{layer}.mlp"
    scores = torch.softmax(tensors[f"{prefix}.gate.weight"].double() @ hidden, dim=0)
    chosen = torch.argsort(scores, descending=True)[: config["num_experts_per_tok"]].tolist()
    total = sum(scores[expert] for expert in chosen) if config["norm_topk_prob"] else 1.0
    output = torch.zeros_like(hidden)
    for expert in chosen:
        output = output + scores[expert] / total * mlp(tensors, f"{prefix}.experts.{expert}", hidden)
    if config["n_shared_experts"]:
        output = output + mlp(tensors, f"{prefix}.shared_experts", hidden)
    return output


def block_traffic(model: PreTrainedModel, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output `[T, H]` of one layer's block in a forward pass."""
    seen: list[torch.Tensor] = []
    hook = model.model.layers[layer].mlp.register_forward_hook(
        lambda _, args, output: seen.extend((args[0].flatten(0, 1), output.flatten(0, 1)))
    )
    with torch.no_grad():
        model(TOKENS)
    hook.remove()
    return seen[0], seen[1]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="as published"),
        pytest.param({"norm_topk_prob": True}, id="renormalised"),
        pytest.param({"n_shared_experts": None}, id="no shared experts"),
        pytest.param({"first_k_dense_replace": 2, "n_shared_experts": 1}, id="two dense layers"),
        pytest.param({"first_k_dense_replace": 0, "moe_layer_freq": 2}, id="every other layer"),
    ],
)
def test_blocks_equal_the_reference(overrides: dict[str, Any], tmp_path: Path) -> None:
    config, tensors = published_checkpoint(tmp_path, **overrides)
    model = load(tmp_path)
    for layer in range(LAYERS):
        hidden, output = block_traffic(model, layer)
        hidden = hidden.double()
        if f"model.layers.{layer}.mlp.gate.weight" in tensors:
            expected = torch.stack([moe_block(config, tensors, layer, token) for token in hidden])
        else:
            expected = mlp(tensors, f"model.layers.{layer}.mlp", hidden)
        assert expected.std() > 0.1  # else the bound below would say little
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-6)


def test_without_experts_it_is_llama(tmp_path: Path) -> None:
    """Attention, rope, norms, head: with every layer dense, logits equal Llama's on the same tensors, bit for bit."""
    config, tensors = published_checkpoint(tmp_path, first_k_dense_replace=LAYERS)
    llama_keys = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=DENSE_INNER,
            num_hidden_layers=LAYERS,
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
            **{key: config[key] for key in llama_keys},
        )
    ).eval()
    llama.load_state_dict(tensors)
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(TOKENS).logits, llama(TOKENS).logits)


def test_saved_again_it_has_the_same_tensors_and_logits(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    _, tensors = published_checkpoint(first)
    model = load(first)
    model.save_pretrained(second)
    saved = load_file(second / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in tensors.items())
    with torch.no_grad():
        assert torch.equal(load(second)(TOKENS).logits, model(TOKENS).logits)


def test_local_registration_wins_over_auto_map(tmp_path: Path) -> None:
    """The published config.json points to remote code; ours is taken, and trust_remote_code is not needed."""
    published_checkpoint(tmp_path)
    registration.register_local_families()
    config: Any = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is deepseek.DeepseekConfig
    assert config.aux_loss_alpha == 0.001  # training keys are kept
    assert config.to_dict()["rope_parameters"]["rope_theta"] == 10000
    assert type(load(tmp_path)) is deepseek.DeepseekForCausalLM


def test_registering_again_changes_nothing() -> None:
    registration.register_local_families()
    converters = len(get_checkpoint_conversion_mapping("deepseek"))
    deepseek.register()
    registration.register_local_families()
    assert len(get_checkpoint_conversion_mapping("deepseek")) == converters > 0
    assert type(AutoConfig.for_model("deepseek")) is deepseek.DeepseekConfig


@pytest.mark.parametrize("family", registration.LOCAL_FAMILIES)
def test_router_and_experts_are_what_the_seam_looks_for(family: str) -> None:
    """The experts are of a class the library dispatches on, and get the very index tensor the router returned."""
    model = zoo.make(family)
    given: list[torch.Tensor] = []
    returned: list[Any] = []
    block = model.model.layers[1].mlp
    assert isinstance(block.experts, Qwen2MoeExperts)
    router = block.gate if family == "deepseek" else block.router
    router.register_forward_hook(lambda _, _args, output: returned.extend(output))
    block.experts.register_forward_pre_hook(lambda _, args: given.extend(args))
    with torch.no_grad():
        eager = model(TOKENS).logits
    logits, weights, index = returned
    assert logits.shape == (TOKENS.numel(), EXPERTS)
    assert given[1] is index
    assert given[2] is weights
    assert index.shape == weights.shape == (TOKENS.numel(), 3)

    model.set_experts_implementation("batched_mm")
    assert model.config._experts_implementation == "batched_mm"
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, eager, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", registration.LOCAL_FAMILIES)
def test_fresh_model_is_initialised(family: str) -> None:
    """3-D expert tensors and bare router weights are not covered by the library's own initialisation."""
    registration.register_local_families()
    config = zoo.make(family).config
    torch.manual_seed(0)
    for name, parameter in AutoModelForCausalLM.from_config(config).named_parameters():
        if "norm" not in name:
            assert 0.8 < parameter.std() / config.initializer_range < 1.2, name


def test_unknown_scoring_function_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="scoring_func 'sigmoid'"):
        zoo.make("deepseek", scoring_func="sigmoid")
