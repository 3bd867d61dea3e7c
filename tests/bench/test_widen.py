"""The wide model computes the function of the small one; catches any wrong padding, norm factor or shard order."""

import json
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench import widen as wide

IDS = torch.tensor([[3, 17, 5, 40, 8, 22, 63, 1, 9]])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A toy checkpoint of 2 layers and 6 experts with weights large enough for every part to matter."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=24,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rms_norm_eps=1e-2,
    )
    model = Qwen2MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    model.bfloat16().save_pretrained(folder)
    return folder


def logits(folder):
    """Float32 logits of a checkpoint on a fixed text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(("hidden", "expert"), [(128, 16), (512, 8), (32, 32), (128, 32)])
def test_same_logits(small, tmp_path, hidden, expert):
    wide.widen(small, tmp_path, hidden, expert)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]) == (hidden, expert, 8)
    assert torch.allclose(logits(tmp_path), logits(small), atol=2e-5, rtol=1e-4)


def test_a_wrong_norm_factor_is_seen(small, tmp_path, monkeypatch):
    monkeypatch.setattr(wide.Widening, "norm_factor", 0.51)
    wide.widen(small, tmp_path, 128, 16)
    assert not torch.allclose(logits(tmp_path), logits(small), atol=2e-5, rtol=1e-4)


def header(path):
    """The tensors of a safetensors file in the order of their bytes."""
    with path.open("rb") as file:
        table = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    table.pop("__metadata__")
    return sorted((value["data_offsets"], name) for name, value in table.items())


def test_an_expert_is_one_range_with_up_after_gate(small, tmp_path):
    wide.widen(small, tmp_path, 128, 16)
    order = header(tmp_path / "model-00002-of-00003.safetensors")
    for expert in range(6):
        mine = [(span, name) for span, name in order if f".experts.{expert}." in name]
        assert [name.split(".")[-2] for _, name in mine] == ["down_proj", "gate_proj", "up_proj"]
        assert mine[-1][0][1] - mine[0][0][0] == 3 * 128 * 16 * 2


def test_new_gate_and_up_entries_are_real_bytes(small, tmp_path):
    wide.widen(small, tmp_path, 128, 16)
    state = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    gate_up = state["model.layers.0.mlp.experts.gate_up_proj"].float()
    assert (gate_up == 0).float().mean() < 0.01
    assert 0.15 < gate_up[:, 8:16].std() < 0.6


def test_repeatable_and_complete_shards_are_kept(small, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    wide.widen(small, first, 128, 16)
    wide.widen(small, second, 128, 16)
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    kept, broken = first / "model-00002-of-00003.safetensors", first / "model-00003-of-00003.safetensors"
    stamp = kept.stat().st_mtime_ns
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-1])
    wide.widen(small, first, 128, 16)
    assert kept.stat().st_mtime_ns == stamp
    assert broken.read_bytes() == whole


def test_shards_of_another_source_are_replaced(small, tmp_path):
    wide.widen(small, tmp_path, 128, 16, seed=1)
    other = (tmp_path / "model-00003-of-00003.safetensors").read_bytes()
    wide.widen(small, tmp_path, 128, 16, seed=0)
    assert (tmp_path / "model-00003-of-00003.safetensors").read_bytes() != other
    assert torch.allclose(logits(tmp_path), logits(small), atol=2e-5, rtol=1e-4)


def test_refuses_a_full_disk_before_writing(small, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(wide.NotEnoughDiskError, match=r"needs 0\.00 GB more .* GB are free"):
        wide.widen(small, tmp_path, 128, 16)
    assert not list(tmp_path.iterdir())


def test_refuses_to_shrink_and_other_families(small, tmp_path):
    with pytest.raises(ValueError, match="cannot shrink"):
        wide.widen(small, tmp_path, 16, 16)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(ValueError, match="only qwen2_moe"):
        wide.widen(other, tmp_path, 128, 16)
