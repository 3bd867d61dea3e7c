"""GGUF files whose experts are quantised: served as they are, beside transformers on the dequantised weights.

Would catch: gate and up exchanged, a layer read in another layer's format, a result that hangs on the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from smoe import from_pretrained
from smoe.errors import CheckpointError
from smoe.formats.plain import PLAIN
from smoe.formats.registry import FORMATS
from smoe.models.quantised_linear import PIECE_ELEMENTS, QuantisedWeight, StoredEmbedding
from smoe.models.read_spec import read_spec
from smoe.presets import configure
from smoe.report.run import dense_bytes
from tests import gguf_toy, oracle, zoo
from tests.formats.blocks import random_rows
from tests.memory.test_gguf_blocks import random_blocks

Open = Callable[..., PreTrainedModel]
PROMPT = oracle.PROMPT[:, :18]
"""Longer than windows are, and behind it as many tokens as are compressed together, and two more."""


def assert_near(ours: list[torch.Tensor], theirs: list[torch.Tensor], bound: float, others: int = 0) -> None:
    """Logits of every position up to rounding, but for `others` at which a router stood between two experts."""
    scale = max(float(each.abs().max()) for each in theirs)
    far = [(a.float() - b.float()).abs().amax(-1).flatten() / scale for a, b in zip(ours, theirs, strict=True)]
    assert int((torch.cat(far) > bound).sum()) <= others, torch.cat(far).tolist()


@torch.no_grad()
def steps(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits of a prompt, and of every decode step after it."""
    found = [model(ids[:, :12], use_cache=True)]
    for n in range(12, ids.shape[1]):
        found.append(model(ids[:, n : n + 1], past_key_values=found[-1].past_key_values, use_cache=True))
    return [each.logits for each in found]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("mixture", gguf_toy.MIXTURES)
def test_logits_are_those_of_the_dequantised_model(
    mixture: str, kernels: str, tmp_path: Path, open_model: Open
) -> None:
    path, theirs = gguf_toy.quantised(tmp_path / "toy.gguf", mixture)
    wanted = steps(theirs, PROMPT)
    minimum = steps(open_model(path, "minimum", kernels=kernels, activations="dtype"), PROMPT)
    assert_near(minimum, wanted, 0.04, others=2)
    if kernels == "auto":  # with torch's: test_experts_may_be_quantised_in_part
        full = steps(open_model(path, "full", activations="dtype"), PROMPT)
        assert all(map(torch.equal, full, minimum)), "a result that hangs on the budget"


@pytest.mark.parametrize("mixture", ["Q4_0", "Q4_K_M", "MXFP4", "IQ4_XS"])
def test_in_32_bits_they_are_equal_but_for_the_last_ones(mixture: str, tmp_path: Path, open_model: Open) -> None:
    path, theirs = gguf_toy.quantised(tmp_path / "toy.gguf", mixture, dtype=torch.float32)
    ours = steps(open_model(path, "half", dtype="float32"), PROMPT)
    assert_near(ours, steps(theirs, PROMPT), 1e-4)


def test_shared_experts_and_several_sequences(tmp_path: Path, open_model: Open) -> None:
    path, theirs = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M", "qwen2_moe")
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    ours = steps(open_model(path, "half", max_sequences=2, activations="dtype"), ids)
    assert_near(ours, steps(theirs, ids), 0.04, others=4)


def test_tied_embeddings_that_are_quantised(tmp_path: Path, open_model: Open) -> None:
    """One matrix in the file for both ends of the model."""
    path, theirs = gguf_toy.quantised(tmp_path / "toy.gguf", "Q8_0", dtype=torch.float32, is_tied=True)
    ours = open_model(path, "half", dtype="float32")
    assert isinstance(ours.lm_head, QuantisedWeight)
    assert_near(steps(ours, PROMPT), steps(theirs, PROMPT), 1e-4)
    spec = read_spec(path, configure(context_tokens=32, dtype="float32"))
    read = dense_bytes(ours) + bytes_of_positions(ours)
    assert read == spec.dense_bytes_read == ours.offload._dense_bytes, "the one matrix is read as output"


def test_the_floor_counts_what_is_read(tmp_path: Path, open_model: Open) -> None:
    """Beside the weights a row of the input embedding, which is none of them."""
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q8_0")
    ours, spec = open_model(path, "full"), read_spec(path, configure(context_tokens=32))
    embedding = ours.get_input_embeddings().codes.nbytes
    read = dense_bytes(ours) + bytes_of_positions(ours)
    assert read == spec.dense_bytes_read == ours.offload._dense_bytes - embedding


@pytest.mark.parametrize("mixture", ["Q8_0", "Q4_K_M", "IQ4_XS"])
def test_below_memory_rows_of_the_embedding_stay_in_the_file(mixture: str, tmp_path: Path, open_model: Open) -> None:
    """The same bits, in a budget smaller by its bytes."""
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", mixture)
    whole, below = open_model(path, "full"), open_model(path, "half")
    assert isinstance(below.get_input_embeddings(), StoredEmbedding)
    kept = whole.get_input_embeddings().codes.nbytes
    assert (
        below.offload.ledger.demand.embedding_bytes == kept == whole.offload._dense_bytes - below.offload._dense_bytes
    )
    assert dense_bytes(below) == dense_bytes(whole)
    assert torch.equal(below.get_input_embeddings().whole(), whole.get_input_embeddings().weight)
    ids = torch.cat([PROMPT, PROMPT], 1)
    assert all(map(torch.equal, steps(below, ids), steps(whole, ids)))


def test_a_row_of_a_damaged_embedding_is_refused(tmp_path: Path, open_model: Open) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q8_0")
    ours = open_model(path, "half")
    rows = ours.get_input_embeddings().rows
    damaged = rows.read([5])
    damaged[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    with path.open("r+b") as file:
        file.seek(rows.tensors[0].offset + 5 * rows.row_bytes)
        file.write(damaged.tobytes())
    ours = open_model(path, "half")
    ours(torch.tensor([[4, 6]]))
    with pytest.raises(CheckpointError, match="token_embd"):
        ours(torch.tensor([[4, 5]]))


def bytes_of_positions(model: PreTrainedModel) -> int:
    """Of buffers that are no weights."""
    others = {each.data_ptr(): each.nbytes for name, each in model.named_buffers() if not name.endswith("codes")}
    return sum(others.values())


def test_slots_of_two_sizes_on_every_tier(tmp_path: Path, open_model: Open) -> None:
    """A host tier too small for all: would catch an expert in a slot of the other size, and one that waits for ever."""
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M", dtype=torch.float32)
    needs = oracle.demand(path)
    assert [each.layers[0] for each in needs.classes] == [0, 1], "six bits in layer 0, four in layer 1"
    switches = {"dtype": "float32", "device": "emulated", "dilation": 20.0, "balance": "none"}
    found = []
    for host_memory in (5 * sum(each.slot_bytes for each in needs.classes), None):
        model = open_model(path, "half", host_memory_bytes=host_memory, io_threads=1, **switches)
        found.append(steps(model, PROMPT))
        model.offload.executor.table.check()
    assert all(map(torch.equal, *found))


def test_an_interrupt_leaves_every_slot_to_its_size(tmp_path: Path, open_model: Open) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M")
    model = open_model(path, "half")
    wanted = steps(model, PROMPT)
    for calls in range(0, 7, 2):
        left = iter(range(calls))

        def strike(*args: object, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_hook(strike)
        with suppress(KeyboardInterrupt):
            steps(model, PROMPT.flip(1))
        handle.remove()
        executor = model.offload.executor
        executor.table.check()
        assert set(executor.table.ready) == executor.arrivals.eviction.residents()
    assert all(map(torch.equal, steps(model, PROMPT), wanted))


def test_on_an_emulated_device(tmp_path: Path, open_model: Open) -> None:
    """Through the host tier, and experts on the CPU beside it."""
    path, theirs = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M", dtype=torch.float32)
    ours = open_model(path, "half", dtype="float32", device="emulated", dilation=20.0)
    assert_near(steps(ours, PROMPT[:, :14]), steps(theirs, PROMPT[:, :14]), 1e-4)


def test_sizes_are_those_of_the_file(tmp_path: Path) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "Q4_K_M")
    spec = read_spec(path, configure(context_tokens=32))
    bits = {"Q4_K": 4.5, "Q6_K": 6.5625}
    assert spec.expert_bytes == 256 * 256 * (2 * bits["Q4_K"] + bits["Q6_K"]) / 8
    assert spec.stored_bytes is not None and spec.stored_bytes[1] == 256 * 256 * 3 * bits["Q4_K"] / 8
    assert spec.unpacked_bytes == (512 * 256 + PIECE_ELEMENTS) * 2
    whole = read_spec(path, configure(context_tokens=32, dense_precision="dtype"))
    quantised_numbers = sum(
        weight.numel() for name, weight in spec.shell.named_parameters() if weight.dim() == 2 and "experts" not in name
    )
    routers = sum(w.numel() for name, w in spec.shell.named_parameters() if name.endswith("mlp.gate.weight"))
    saved = (quantised_numbers - routers) * (16 - 8.5) / 8
    assert whole.weights_bytes - spec.weights_bytes == saved and not whole.dense


@pytest.mark.parametrize("mixture", ["Q8_0", *gguf_toy.DENSE])
def test_what_is_kept_is_what_was_promised(mixture: str, tmp_path: Path, open_model: Open) -> None:
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", mixture)
    model = open_model(path, "full")
    layers = [module for module in model.modules() if isinstance(module, QuantisedWeight)]
    assert len(layers) == 2 + 4 * model.config.num_hidden_layers, "embedding, output, projections"
    assert {layer.form.name for layer in layers} == set(gguf_toy.DENSE.get(mixture, ["Q8_0"]))
    assert model.offload.ledger.demand.weights_bytes == model.offload._dense_bytes


def test_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    model = zoo.make("qwen3_moe", dtype=torch.bfloat16, **gguf_toy.SIZES)
    data = random_rows(FORMATS["Q8_0"], model.config.num_experts * 256, 256, 0).reshape(-1, 256, 272)
    data[3, 7, :2] = np.array([np.inf], np.float16).view(np.uint8)
    path = gguf_toy.write(
        tmp_path / "toy.gguf", model, experts=Type.Q8_0, blocks={"blk.0.ffn_up_exps.weight": (data, Type.Q8_0)}
    )
    ours = from_pretrained(path, memory="64MiB", context_tokens=32)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up_exps.*expert 3 in layer 0.*scale.*NaN or infinite"):
        ours.generate(PROMPT, max_new_tokens=2)
    ours.offload.close()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_experts_may_be_quantised_in_part(kernels: str, tmp_path: Path, open_model: Open) -> None:
    """Within an expert, and between layers; the others keep their own types."""
    path, theirs = in_part(tmp_path)
    wanted = steps(theirs, PROMPT)
    for activations in ("auto", "dtype"):
        full, minimum = (
            steps(open_model(path, budget, kernels=kernels, activations=activations), PROMPT)
            for budget in ("full", "minimum")
        )
        assert all(map(torch.equal, full, minimum)), "a result that hangs on the budget"
        assert_near(full, wanted, 0.04, others=2)
    spec = read_spec(path, configure(context_tokens=32))
    assert spec.expert_bytes == 256 * 256 * (1 + 2 / 32 + 2 + 4), "Q8_0, BF16, F32"


def in_part(folder: Path) -> tuple[Path, PreTrainedModel]:
    """A file with one matrix of layer 0 in Q8_0, others in BF16, F32 and F16, and the library's model."""
    model = zoo.make("qwen3_moe", dtype=torch.bfloat16, **gguf_toy.SIZES)
    shape = (model.config.num_experts, 256, 256)
    kinds = {"blk.0.ffn_up_exps": "Q8_0", "blk.0.ffn_down_exps": "F32", "blk.1.ffn_gate_exps": "F16"}
    blocks = {}
    for n, (key, name) in enumerate(kinds.items()):
        data = random_rows((FORMATS | PLAIN)[name], shape[0] * 256, 256, n, spread=0.004 if name == "Q8_0" else 0.03)
        data = data.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
        blocks[f"{key}.weight"] = data.reshape(shape[0], 256, -1), Type[name]
    path = gguf_toy.write(folder / "toy.gguf", model, blocks=blocks)
    gguf_toy.take_weights(model, path)
    return path, model


def test_rows_beside_quantised_ones_are_whole_units(tmp_path: Path) -> None:
    model = zoo.make("qwen3_moe", dtype=torch.bfloat16, **{**gguf_toy.SIZES, "moe_intermediate_size": 40})
    data = random_rows(FORMATS["Q8_0"], model.config.num_experts * 40, 256, 0).reshape(-1, 40, 272)
    path = gguf_toy.write(tmp_path / "toy.gguf", model, blocks={"blk.0.ffn_up_exps.weight": (data, Type.Q8_0)})
    with pytest.raises(CheckpointError, match=r"BF16\[256, 40\].*other matrices of the experts.*16 numbers"):
        from_pretrained(path, memory="64MiB", context_tokens=32)


@pytest.mark.parametrize("dense", ["as-stored", "dtype"])
def test_blocks_that_become_others(dense: str, tmp_path: Path, open_model: Open) -> None:
    """NVFP4 with scales of its matrices and experts, and TQ1_0, beside a format that stays as it is."""
    model = zoo.make("qwen3_moe", dtype=torch.float32, **gguf_toy.SIZES)
    experts = model.config.num_experts
    kinds = {"blk.0.ffn_gate_exps": "NVFP4", "blk.0.ffn_down_exps": "Q4_K", "blk.1.ffn_up_exps": "TQ1_0"}
    weights, blocks, scales = gguf_toy.tensors_of(model), {}, {}
    for n, (key, name) in enumerate({**kinds, "blk.0.attn_q": "NVFP4", "output": "TQ1_0"}.items()):
        shape = weights[f"{key}.weight"].shape
        make = random_rows if name in FORMATS else random_blocks
        data = make(FORMATS.get(name, name), shape[:-1].numel(), shape[-1], n)
        blocks[f"{key}.weight"] = data.reshape(*shape[:-1], -1), Type[name]
        if name == "NVFP4":
            scales[key] = torch.linspace(0.02, 0.04, experts if "_exps" in key else 1)
    more = {f"{key}.scale": scale for key, scale in scales.items()}
    more |= {f"{key}.input_scale": torch.ones(1) for key in scales}
    path = gguf_toy.write(tmp_path / "toy.gguf", model, dense=Type.Q8_0, blocks=blocks, tensors=more)
    gguf_toy.take_weights(model, path)
    for key, scale in scales.items():
        with torch.no_grad():
            weights[f"{key}.weight"].mul_(scale.view(-1, 1, 1) if "_exps" in key else scale)
    ours = open_model(path, "half", dtype="float32", dense_precision=dense)
    assert_near(steps(ours, PROMPT), steps(model, PROMPT), 1e-4)
    assert ours.offload.ledger.demand.weights_bytes >= ours.offload._dense_bytes
    in_halves = steps(open_model(path, "half", dense_precision=dense), PROMPT)
    assert_near(in_halves, steps(model.bfloat16(), PROMPT), 0.04, others=2)
