"""gpt_oss checkpoints with MXFP4 experts, as OpenAI releases them, beside transformers on the dequantised weights.

Would catch: the halves of a byte exchanged, scales of another row, a bias left out or of another expert, a result that
hangs on the budget, the library's own quantiser called.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from smoe import from_pretrained
from smoe.errors import BudgetError, CheckpointError, UnsupportedModelError
from smoe.models.read_spec import read_spec
from smoe.policy.budget import minimum_bytes
from smoe.presets import configure
from tests import mxfp4_toy, oracle, zoo
from tests.models.test_gguf_quantised import assert_near, steps
from tests.mxfp4_toy import Tensors
from tests.runtime.test_preload import wait_for_all

Open = Callable[..., PreTrainedModel]
EXPERTS = "model.layers.{}.mlp.experts."
EXPERT_BYTES = (64 * 64 + 64 * 32) // 32 * 17 + (64 + 64) * 2
"""Of the toy: 64 outputs of 64 columns, 64 of 32, in blocks of 32 numbers and 17 bytes; two biases."""

PUBLISHED_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": mxfp4_toy.QUANTISATION,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
"""Its config.json."""


def test_the_toys_codes_are_read_by_transformers_as_they_are_meant() -> None:
    """Any scale but NaN's, so that all of the library's arithmetic is seen."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 5, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 250, (3, 5, 4), dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
    assert torch.equal(mxfp4_toy.decode(codes, scales).transpose(1, 2), theirs)
    numbers = mxfp4_toy.decode(codes, scales.clamp(110, 120))
    assert torch.equal(mxfp4_toy.decode(*mxfp4_toy.encode(numbers)), numbers), "nothing is lost twice"


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("shards", [1, 5])
def test_logits_are_those_of_the_dequantised_model(shards: int, kernels: str, tmp_path: Path, open_model: Open) -> None:
    wanted = steps(mxfp4_toy.save(tmp_path, shards=shards), oracle.PROMPT)
    full, minimum = (
        steps(open_model(tmp_path, budget, kernels=kernels, activations="dtype"), oracle.PROMPT)
        for budget in ("full", "minimum")
    )
    assert all(map(torch.equal, full, minimum)), "a result that hangs on the budget"
    assert_near(full, wanted, 0.04, others=2)


def test_in_32_bits_they_are_equal_but_for_the_last_ones(tmp_path: Path, open_model: Open) -> None:
    theirs = mxfp4_toy.save(tmp_path, torch.float32)
    ours = steps(open_model(tmp_path, "half", dtype="float32"), oracle.PROMPT)
    assert_near(ours, steps(theirs, oracle.PROMPT), 1e-5)


def test_long_sums_in_32_bits_are_right(tmp_path: Path, open_model: Open) -> None:
    """The library's matrices lie the other way round, so its products of long rows sum in another order:
    would catch a proof at load that calls that an error."""
    sizes = {"hidden_size": 1536, "intermediate_size": 1024, "num_local_experts": 3}
    theirs = mxfp4_toy.save(
        tmp_path, torch.float32, num_hidden_layers=1, layer_types=["full_attention"], head_dim=16, **sizes
    )
    ours = steps(open_model(tmp_path, "full", dtype="float32"), oracle.PROMPT)
    assert_near(ours, steps(theirs, oracle.PROMPT), 1e-5)


def test_several_sequences(tmp_path: Path, open_model: Open) -> None:
    theirs = mxfp4_toy.save(tmp_path)
    ids = torch.cat([oracle.PROMPT, oracle.PROMPT.flip(1), oracle.PROMPT.roll(3, 1)])
    ours = [
        steps(open_model(tmp_path, budget, max_sequences=3, activations="dtype"), ids) for budget in ("full", "minimum")
    ]
    assert all(map(torch.equal, *ours))
    assert_near(ours[0], steps(theirs, ids), 0.04, others=4)


@pytest.mark.parametrize("balance", ["none", "optimal"])
def test_on_an_emulated_device(balance: str, tmp_path: Path, open_model: Open) -> None:
    """Through a host tier too small for all; with `optimal` the CPU computes some beside the device."""
    theirs = mxfp4_toy.save(tmp_path, torch.float32)
    switches = {"dtype": "float32", "device": "emulated", "dilation": 20.0, "balance": balance}
    ours = open_model(tmp_path, "half", host_memory_bytes=8 * 2**14, **switches)
    assert_near(steps(ours, oracle.PROMPT[:, :14]), steps(theirs, oracle.PROMPT[:, :14]), 1e-5)
    ours.offload.executor.table.check()


def test_everything_is_read_ahead_where_it_fits(tmp_path: Path, open_model: Open) -> None:
    mxfp4_toy.save(tmp_path)
    ahead, asked = open_model(tmp_path, "full", preload=None), open_model(tmp_path, "minimum")
    wait_for_all(ahead)
    assert len(ahead.offload.executor.table.ready) == 4 * zoo.EXPERTS
    assert all(map(torch.equal, steps(ahead, oracle.PROMPT), steps(asked, oracle.PROMPT)))


def test_sizes_are_those_of_the_file(tmp_path: Path, open_model: Open) -> None:
    """In the plan, which reads config.json alone, and in the slots, which have whole pages."""
    mxfp4_toy.save(tmp_path)
    config_alone = tmp_path / "config alone"
    config_alone.mkdir()
    shutil.copy(tmp_path / "config.json", config_alone)
    spec = read_spec(config_alone, configure(context_tokens=32))
    assert spec.expert_bytes == EXPERT_BYTES and spec.experts_bytes == 4 * zoo.EXPERTS * EXPERT_BYTES
    assert spec.unpacked_bytes == 64 * 64 * 2
    model = open_model(tmp_path, "full")
    store = model.offload.store
    assert EXPERT_BYTES <= store.expert_bytes < EXPERT_BYTES + 4 * 64
    assert set(store.slot_bytes.values()) == {4096}
    assert model.offload.ledger.demand.weights_bytes == model.offload._dense_bytes == spec.weights_bytes
    in_fp32 = read_spec(config_alone, configure(context_tokens=32, dtype="float32"))
    assert in_fp32.expert_bytes == EXPERT_BYTES + (64 + 64) * 2, "biases are of the type that is computed in"


def test_the_published_20b_by_its_configuration(tmp_path: Path) -> None:
    """24 layers of 32 experts of 13.2 MB: 10.2 of its 13.8 GB, where bf16 would have 38. It names no element type."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_20B))
    spec = read_spec(tmp_path, configure())
    assert spec.expert_bytes == 3 * 2880 * 2880 // 32 * 17 + 3 * 2880 * 2
    assert 24 * 32 * spec.expert_bytes == spec.experts_bytes == pytest.approx(10.17e9, rel=0.01)
    assert spec.dtype.torch is torch.bfloat16
    assert spec.experts_bytes + spec.weights_bytes == pytest.approx(13.76e9, rel=0.01), "what the release has"


def test_a_budget_below_the_least_says_how_much_is_needed(tmp_path: Path) -> None:
    mxfp4_toy.save(tmp_path)
    least = minimum_bytes(oracle.demand(tmp_path))
    with pytest.raises(BudgetError):
        from_pretrained(tmp_path, memory=least - 1, context_tokens=oracle.CONTEXT)
    from_pretrained(tmp_path, memory=least, context_tokens=oracle.CONTEXT).offload.close()


def test_the_library_is_not_asked_to_convert(tmp_path: Path, open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the library's quantiser was called")

    mxfp4_toy.save(tmp_path)
    for name in ("__init__", "validate_environment", "_process_model_before_weight_loading"):
        monkeypatch.setattr(Mxfp4HfQuantizer, name, asked)
    model = open_model(tmp_path, "half")
    assert not hasattr(model.config, "quantization_config") and not hasattr(model, "hf_quantizer")
    model.generate(oracle.PROMPT, max_new_tokens=2, do_sample=False)


# what is refused


def refused(tmp_path: Path, change: Callable[[Tensors], None], says: str, shards: int = 1) -> None:
    mxfp4_toy.save(tmp_path, shards=shards, change=change)
    with pytest.raises(CheckpointError, match=says):
        from_pretrained(tmp_path, memory="64MiB", context_tokens=32)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("kept", "missing"), [("blocks", "scales"), ("scales", "blocks")])
def test_half_of_a_weight(kept: str, missing: str, shards: int, tmp_path: Path) -> None:
    key = EXPERTS.format(2) + "down_proj_"

    def change(tensors: Tensors) -> None:
        del tensors[key + missing]

    says = rf"\.safetensors has '{key}{kept}', but no shard has the matching '{key}{missing}'"
    refused(tmp_path, change, says, shards)


@pytest.mark.parametrize("missing", ["gate_up_proj", "gate_up_proj_bias"])
def test_a_weight_that_is_not_there(missing: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.startswith(EXPERTS.format(1) + missing)]:
            if missing.endswith("bias") or not key.endswith("bias"):
                del tensors[key]

    refused(tmp_path, change, f"has no {missing} for expert 0 of layer 1")


@pytest.mark.parametrize(
    ("name", "cut", "says"),
    [
        ("down_proj_scales", lambda t: t[:, :-1], r"down_proj_scales' and '.*_blocks' have the shapes \[8, 63, 1\]"),
        ("down_proj_scales", lambda t: t[:-1], r"down_proj_scales' and .* have the shapes \[7, 64, 1\]"),
        ("down_proj_blocks", lambda t: t[..., :8], r"should be \[experts, rows, blocks\] and .*, 16\]"),
        ("down_proj_blocks", lambda t: t.flatten(2), "down_proj_blocks"),
        ("gate_up_proj_blocks", lambda t: t.to(torch.int8), "gate_up_proj_blocks' is I8, and MXFP4 is stored as bytes"),
        ("gate_up_proj_scales", lambda t: t.bfloat16(), "gate_up_proj_scales' is BF16"),
        ("gate_up_proj_bias", lambda t: t[:, :-1], "gate_up_proj_bias' and the tensors of the same part have 63 rows"),
    ],
)
def test_shapes_and_types_that_cannot_be(
    name: str, cut: Callable[[torch.Tensor], torch.Tensor], says: str, tmp_path: Path
) -> None:
    key = EXPERTS.format(1) + name
    refused(tmp_path, lambda tensors: tensors.update({key: cut(tensors[key])}), says)


@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["experts", "rows", "columns"])
def test_codes_and_scales_of_another_size(dimension: int, tmp_path: Path) -> None:
    """They fit each other, and not config.json."""
    stem = EXPERTS.format(1) + "gate_up_proj"

    def change(tensors: Tensors) -> None:
        for key in (f"{stem}_blocks", f"{stem}_scales"):
            tensors[key] = tensors[key].narrow(dimension, 0, tensors[key].shape[dimension] // 2)

    refused(tmp_path, change, f"'{stem}_blocks'.* (should have 8 experts|have the shapes|has the shape|rows)")


def test_a_shard_cut_short(tmp_path: Path) -> None:
    mxfp4_toy.save(tmp_path, shards=3)
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is truncated"):
        from_pretrained(tmp_path, memory="64MiB", context_tokens=32)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("gate_up_proj_scales", 255, "has a scale that is NaN or infinite in MXFP4"),
        ("down_proj_scales", 255, "has a scale that is NaN or infinite in MXFP4"),
        ("down_proj_bias", float("nan"), "holds NaN or infinity"),
        ("gate_up_proj_bias", float("-inf"), "holds NaN or infinity"),
    ],
)
def test_what_is_no_number_is_named(name: str, value: float, says: str, tmp_path: Path, open_model: Open) -> None:
    """When the expert is first read."""
    key = EXPERTS.format(1) + name
    mxfp4_toy.save(tmp_path, change=lambda tensors: tensors[key][5].view(-1)[-1:].fill_(value))
    model = open_model(tmp_path, "minimum")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"'{key}'.*expert 5 in layer 1.*{says}"):
            steps(model, oracle.PROMPT)


def test_experts_that_have_been_converted_under_the_old_configuration(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith("_blocks")]:
            codes, scales = tensors.pop(key), tensors.pop(key.replace("_blocks", "_scales"))
            numbers = mxfp4_toy.decode(codes, scales).transpose(1, 2).bfloat16()
            tensors[key.removesuffix("_blocks")] = numbers

    refused(tmp_path, change, "gate_up_proj' is BF16, but by config.json.*remove 'quantization_config'")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    from_pretrained(tmp_path, memory="64MiB", context_tokens=32).offload.close()


def test_the_same_weight_twice(tmp_path: Path) -> None:
    stem = EXPERTS.format(0) + "down_proj"
    refused(tmp_path, lambda tensors: tensors.update({stem: torch.zeros(8, 32, 64)}), f"'{stem}_blocks' and '{stem}'")


@pytest.mark.parametrize(
    ("family", "quantisation", "says"),
    [
        ("qwen3_moe", mxfp4_toy.QUANTISATION, r"quantised \(mxfp4\), 'qwen3_moe'"),
        ("gpt_oss", {"quant_method": "bitsandbytes"}, r"quantised \(bitsandbytes\), 'gpt_oss'"),
        ("gpt_oss", {"quant_method": "hqq", "bits": 4}, r"quantised \(hqq\)"),
        ("gpt_oss", {}, r"quantised \(\?\)"),
    ],
)
def test_other_quantisation_is_refused_by_name(
    family: str, quantisation: dict[str, object], says: str, tmp_path: Path
) -> None:
    config = {**zoo.make(family).config.to_dict(), "quantization_config": quantisation}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=f"{says}.*docs/formats.md"):
        read_spec(tmp_path, configure())


def test_a_lower_precision_is_planned_by_the_configuration_alone(tmp_path: Path) -> None:
    """Rows of 64 in INT2, of 32 in Q4_1, and the biases."""
    mxfp4_toy.save(tmp_path)
    spec = read_spec(tmp_path, configure(precision="int2"))
    assert spec.expert_bytes == 64 * 24 + 64 * 20 + (64 + 64) * 2 < EXPERT_BYTES


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    config = {**zoo.make("gpt_oss", intermediate_size=48).config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": mxfp4_toy.QUANTISATION}))
    with pytest.raises(CheckpointError, match=r"config\.json, the rows of down_proj have 48 numbers.*blocks of 32"):
        read_spec(tmp_path, configure())
