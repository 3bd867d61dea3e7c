"""XVERSE-MoE against a MoE block written out here from raw checkpoint tensors, under the published names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from smoe.errors import NotMoEError
from smoe.models import registration, xverse
from tests.models.published import HIDDEN, TOKENS, VOCAB, Tensors, load, mlp, moe_tensors, publish, published_tensors

torch.set_num_threads(1)

INNER, EXPERTS, LAYERS = 32, 8, 2

# The published keys of XVERSE-MoE-A4.2B, at toy size. There is no num_key_value_heads and no norm_topk_prob.
PUBLISHED: dict[str, Any] = {
    "architectures": ["XverseForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_xverse.XverseConfig",
        "AutoModelForCausalLM": "modeling_xverse.XverseForCausalLM",
    },
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 256,
    "model_type": "xverse",
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "rope_theta": 500000,
    "moe_top_k": 3,
    "num_experts": EXPERTS,
    "num_shared_experts": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.01,
    "torch_dtype": "float32",
    "transformers_version": "4.38.2",
    "use_cache": True,
    "vocab_size": VOCAB,
}


def published_checkpoint(folder: Path, **overrides: Any) -> tuple[dict[str, Any], Tensors]:
    """Write config.json and model.safetensors as published."""
    config = {**PUBLISHED, **overrides}
    shared = config["num_shared_experts"]
    tensors = published_tensors(LAYERS, lambda _, layer: moe_tensors(layer, "router", EXPERTS, INNER, shared))
    publish(folder, config, tensors)
    return config, tensors


def moe_block(config: dict[str, Any], tensors: Tensors, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """Reference MoE block for one token `[H]`, in double precision."""
    prefix = f"model.layers.{layer}.mlp"
    scores = torch.softmax(tensors[f"{prefix}.router.weight"].double() @ hidden, dim=0)
    chosen = torch.argsort(scores, descending=True)[: config["moe_top_k"]].tolist()
    total = sum(scores[expert] for expert in chosen) + 1e-6 if config.get("norm_topk_prob", True) else 1.0
    output = torch.zeros_like(hidden)
    for expert in chosen:
        output = output + scores[expert] / total * mlp(tensors, f"{prefix}.experts.{expert}", hidden)
    if config["num_shared_experts"]:
        output = output + mlp(tensors, f"{prefix}.shared_experts", hidden)
    return output


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="as published"),
        pytest.param({"norm_topk_prob": False}, id="flag false"),
        pytest.param({"norm_topk_prob": True}, id="flag true"),
        pytest.param({"num_shared_experts": None}, id="no shared experts"),
    ],
)
def test_blocks_equal_the_reference(overrides: dict[str, Any], tmp_path: Path) -> None:
    config, tensors = published_checkpoint(tmp_path, **overrides)
    model = load(tmp_path)
    for index, layer in enumerate(model.model.layers):
        hidden = torch.randn(2, 12, HIDDEN, generator=torch.Generator().manual_seed(index))
        with torch.no_grad():
            output = layer.mlp(hidden)
        tokens = hidden.flatten(0, 1).double()
        expected = torch.stack([moe_block(config, tensors, index, token) for token in tokens])
        assert expected.std() > 0.1  # else the bound below would say little
        torch.testing.assert_close(output.flatten(0, 1).double(), expected, rtol=0, atol=1e-6)


def test_weights_sum_to_just_below_one(tmp_path: Path) -> None:
    """The 1e-6 in the denominator: below the block test's bound, so looked at by itself, in double precision."""
    published_checkpoint(tmp_path)
    router = load(tmp_path).model.layers[0].mlp.router
    hidden = 1e-3 * torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(0))  # scores near 1/8 each
    _, weights, _ = router(hidden)
    shortfall = 1 - weights.double().sum(dim=-1)
    assert shortfall.mean().item() == pytest.approx(1e-6 / (3 / 8), rel=0.1)


def test_router_stays_in_fp32_in_a_bf16_model(tmp_path: Path) -> None:
    """fp32 routers are read exactly, and the logits are computed in fp32 from the bf16 input."""
    _, tensors = published_checkpoint(tmp_path)
    model = load(tmp_path, torch.bfloat16)
    block = model.model.layers[1].mlp
    stored = tensors["model.layers.1.mlp.router.weight"]
    assert not torch.equal(stored, stored.bfloat16().float())
    assert torch.equal(block.router.weight, stored)
    assert block.experts.gate_up_proj.dtype == torch.bfloat16
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    router_logits, weights, _ = block.router(hidden)
    assert torch.equal(router_logits, torch.nn.functional.linear(hidden.float(), stored))
    assert weights.dtype == torch.bfloat16
    with torch.no_grad():
        assert model(TOKENS).logits.isfinite().all()


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
    assert type(config) is xverse.XverseConfig
    assert (config.num_experts_per_tok, config.moe_intermediate_size) == (3, INNER)  # the library's names
    assert config.num_key_value_heads == config.num_attention_heads
    model = load(tmp_path)
    assert type(model) is xverse.XverseForCausalLM
    head_dim = HIDDEN // 4
    expected = 500000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)


def test_dense_model_of_the_same_type_is_refused(tmp_path: Path) -> None:
    """XVERSE-7B, -13B and -65B share the model_type but have no num_experts."""
    config = {key: value for key, value in PUBLISHED.items() if key not in ("moe_top_k", "num_experts")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    registration.register_local_families()
    with pytest.raises(NotMoEError, match="no num_experts"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
