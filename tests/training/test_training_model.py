"""The training model is Qwen2-MoE or Mixtral: same function, same weights, and its own backward pass is right."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralForCausalLM, Qwen2MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from training.export import from_transformers, to_transformers
from training.losses import ChunkedCrossEntropy, balance_losses, token_loss
from training.model import (
    ModelConfig,
    MoeModel,
    Routing,
    dense_experts,
    document_lengths,
    initialise,
    routed_experts,
)

TINY = ModelConfig(
    vocab_size=50,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=16,
    max_position_embeddings=32,
)
MIXTRAL = {"shared_expert_intermediate_size": 0, "attention_bias": False}
"""What makes a Mixtral of `TINY`."""


def make(backend="routed", **changes):
    """A tiny model whose biases, norms and output projections are far from their neutral values."""
    model = MoeModel(ModelConfig(**(TINY.to_dict() | changes)), backend)
    generator = torch.Generator().manual_seed(1)
    initialise(model, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator))
    return model


@pytest.mark.parametrize(
    ("changes", "theirs"),
    [
        ({}, Qwen2MoeForCausalLM),
        ({"norm_topk_prob": False}, Qwen2MoeForCausalLM),
        ({"attention_bias": False}, Qwen2MoeForCausalLM),
        (MIXTRAL, MixtralForCausalLM),
    ],
)
@pytest.mark.parametrize("backend", ["dense", "routed"])
def test_logits_equal_transformers(backend, changes, theirs):
    model = make(backend, **changes)
    ids = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(0))
    twin = to_transformers(model)
    assert type(twin) is theirs
    with torch.no_grad():
        hidden_states, _ = model(ids)
        expected = twin(ids).logits
    assert torch.allclose(model.logits(hidden_states), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "model_type", "key"),
    [
        ({"norm_topk_prob": False}, "qwen2_moe", "model.layers.1.mlp.experts.5.gate_proj.weight"),
        (MIXTRAL, "mixtral", "model.layers.1.block_sparse_moe.experts.5.w1.weight"),
    ],
)
def test_saved_layout_is_per_expert_and_loads_back(tmp_path, changes, model_type, key):
    model = make(**changes)
    to_transformers(model).save_pretrained(tmp_path)
    back = from_transformers(tmp_path)
    assert back.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), back.state_dict().values(), strict=True))
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert key in names
    assert "lm_head.weight" not in names
    assert not any("gate_up_proj" in name for name in names)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == model_type


def test_routed_experts_equal_dense_ones_with_their_gradients():
    generator = torch.Generator().manual_seed(2)
    tokens, experts, hidden, inner, top_k = 40, 7, 12, 5, 3

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, gate_up, down, logits = (
        draw(tokens, hidden),
        draw(experts, 2 * inner, hidden),
        draw(experts, hidden, inner),
        draw(tokens, experts),
    )
    logits[:, 4] = -100.0  # an expert nobody chooses
    weights, index = logits.softmax(-1).topk(top_k)
    results = []
    for function in (dense_experts, routed_experts):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, weights, gate_up, down)]
        out = function(inputs[0], index, *inputs[1:])
        (out * draw(tokens, hidden).mul(0).add(torch.arange(hidden))).sum().backward()
        results.append((out, *(tensor.grad for tensor in inputs)))
    for dense, routed in zip(*results, strict=True):
        assert torch.allclose(dense, routed, atol=1e-10)
    assert results[1][3][4].abs().sum() == 0


def test_padding_on_the_right_changes_nothing():
    model = make()
    ids = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        alone, padded = model(ids[:, :7])[0], model(ids)[0]
    assert torch.allclose(alone, padded[:, :7], atol=1e-5)


def test_documents_of_a_row_do_not_see_each_other():
    model = make()
    ids = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(5))
    ids[0, 4] = ids[0, 11] = ids[1, 6] = ids[1, 7] = 0
    lengths = document_lengths(ids, 0)
    assert lengths == [5, 7, 7, 1, 4]
    with torch.no_grad():
        together = model(ids, lengths)[0].flatten(0, 1)
        apart = torch.cat([model(part[None])[0][0] for part in ids.flatten().split(lengths)])
    assert torch.allclose(together, apart, atol=1e-5)


def test_chunked_loss_has_the_values_and_gradients_of_the_plain_one():
    generator = torch.Generator().manual_seed(6)
    hidden, head = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (11, 20))
    targets, weights = torch.arange(11), torch.rand(11, generator=generator, dtype=torch.float64)
    results = []
    for chunked in (True, False):
        x, y = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        if chunked:
            losses = ChunkedCrossEntropy.apply(x, y, targets, weights, 4)
        else:
            losses = torch.nn.functional.cross_entropy(x @ y.t(), targets, reduction="none")
        (losses * weights).sum().backward()
        results.append((losses, x.grad, y.grad))
    assert all(torch.allclose(mine, plain, atol=1e-12) for mine, plain in zip(*results, strict=True))


def test_balance_loss_is_one_when_even_and_large_when_not():
    index = torch.arange(6).repeat(4)[:, None]
    balance, _ = balance_losses(Routing([torch.zeros(24, 6)], [index]))
    assert balance == pytest.approx(1.0)
    logits = torch.zeros(24, 6)
    logits[:, 0] = 50.0
    balance, _ = balance_losses(Routing([logits], [torch.zeros(24, 1, dtype=torch.long)]))
    assert balance == pytest.approx(6.0)


def test_loss_weights_select_tokens():
    model = make()
    ids = torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(4))
    weights = torch.zeros(1, 8)
    weights[0, 5] = 3.0
    loss, losses = token_loss(model, model(ids[:, :-1])[0], ids[:, 1:], weights)
    assert loss.item() == pytest.approx(losses[5].item(), rel=1e-5)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="do not divide"):
        ModelConfig(hidden_size=100, num_attention_heads=7)
    with pytest.raises(ValueError, match="cannot choose 9 of 4"):
        ModelConfig(num_experts=4, num_experts_per_tok=9)
    for changes in ({"attention_bias": True}, {"norm_topk_prob": False}):
        with pytest.raises(ValueError, match="is a Mixtral"):
            ModelConfig(**(MIXTRAL | changes))
