"""GGUF files of every family that is read, as converters write them, beside transformers on the dequantised weights.

Would catch: a weight under another's name, gate and up exchanged, rows in the file's order, a bias or a sink left out,
an entry of the metadata that is not heard.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoTokenizer, PreTrainedModel

from smoe import from_pretrained
from smoe.errors import CheckpointError, NotMoEError, UnsupportedModelError
from smoe.memory.gguf_header import GgufHeader, read_gguf_header
from smoe.memory.safetensors_index import FileIdentity
from smoe.models import gguf_families
from smoe.models.checkpoint import checkpoint_at
from tests import gguf_toy, zoo
from tests.models.test_gguf_quantised import PROMPT, assert_near, steps

Open = Callable[..., PreTrainedModel]
FAMILIES = tuple(gguf_toy.ARCHITECTURES)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_dequantised_model(family: str, tmp_path: Path, open_model: Open) -> None:
    """Experts in two formats by the layer, other matrices in a third; whatever the budget. (Tokens that look back to
    one for which a router chose another expert differ, too.)"""
    path, theirs = gguf_toy.quantised(tmp_path / "toy.gguf", "MXFP4", family)
    full, minimum = (steps(open_model(path, budget, activations="dtype"), PROMPT) for budget in ("full", "minimum"))
    assert all(map(torch.equal, full, minimum)), "a result that hangs on the budget"
    assert_near(full, steps(theirs, PROMPT), 0.04, others=4)


@pytest.mark.parametrize("mixture", ["MXFP4", "Q4_K_M"])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_32_bits_they_are_equal_but_for_the_last_ones(
    family: str, mixture: str, tmp_path: Path, open_model: Open
) -> None:
    path, theirs = gguf_toy.quantised(tmp_path / "toy.gguf", mixture, family, torch.float32)
    ours = steps(open_model(path, "half", dtype="float32"), PROMPT)
    assert_near(ours, steps(theirs, PROMPT), 1e-4)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
def test_plain_numbers_are_the_models_bit_for_bit(family: str, tmp_path: Path, open_model: Open) -> None:
    model = gguf_toy.make(family, dtype=torch.bfloat16)
    path = gguf_toy.write(tmp_path / "toy.gguf", model)
    assert all(map(torch.equal, steps(open_model(path, "half"), PROMPT), steps(model, PROMPT)))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
def test_quantised_matrices_beside_plain_experts(family: str, tmp_path: Path, open_model: Open) -> None:
    model = gguf_toy.make(family, shared_expert_intermediate_size=64)
    path = gguf_toy.write(tmp_path / "toy.gguf", model, dense=Type.Q8_0)
    gguf_toy.take_weights(model, path)
    ours = steps(open_model(path, "half", dtype="float32"), PROMPT)
    assert_near(ours, steps(model, PROMPT), 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_is_the_models(family: str, tmp_path: Path) -> None:
    model = gguf_toy.make(family)
    path = gguf_toy.write(tmp_path / "toy.gguf", model, experts=Type.Q8_0)
    ours, theirs = (config.to_dict() for config in (checkpoint_at(path).config(), model.config))
    unsaid = {"_name_or_path", "vocab_size", "eos_token_id", "bos_token_id", "pad_token_id", "architectures", "dtype"}
    unused = {"intermediate_size"} if "moe_intermediate_size" in theirs else set()
    differing = {key: (ours[key], theirs[key]) for key in theirs.keys() - unsaid - unused if ours[key] != theirs[key]}
    assert set(differing) <= {"rms_norm_eps"}, differing
    assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"])


def test_gpt_oss_goes_straight_to_its_slots(tmp_path: Path, open_model: Open) -> None:
    """Its matrices, by the page; only its biases pass through a buffer, to come in the type that is computed in."""
    path, _ = gguf_toy.quantised(tmp_path / "toy.gguf", "MXFP4", "gpt_oss")
    store = open_model(path, "half").offload.store
    assert not store.is_staged
    for key in store.keys():  # noqa: SIM118
        placement = store.placement(*key)
        assert len(placement.reads) == 3 and {piece.dtype for piece in placement.pieces} == {"F32"}
        behind = max(read.target + read.nbytes for read in placement.reads)
        assert all(behind <= piece.target for piece in placement.pieces), "a read writes whole pages"
        assert placement.nbytes <= placement.slot_bytes <= store.slot_bytes[key[0]]


def test_gpt_oss_of_plain_numbers_is_refused(tmp_path: Path) -> None:
    path = gguf_toy.write(tmp_path / "toy.gguf", zoo.make("gpt_oss", dtype=torch.bfloat16))
    with pytest.raises(UnsupportedModelError, match=r"'blk.0.ffn_gate_exps.weight'.*BF16.*are quantised, as published"):
        from_pretrained(path, memory="64MiB")


def test_gpt_oss_on_an_emulated_device(tmp_path: Path, open_model: Open) -> None:
    """Through a host tier too small for all, and on the CPU beside it."""
    path, theirs = gguf_toy.quantised(tmp_path / "toy.gguf", "MXFP4", "gpt_oss", torch.float32)
    switches = {"dtype": "float32", "device": "emulated", "dilation": 20.0, "balance": "optimal"}
    ours = open_model(path, "half", host_memory_bytes=8 * 2**17, **switches)
    assert_near(steps(ours, PROMPT[:, :14]), steps(theirs, PROMPT[:, :14]), 1e-4)
    ours.offload.executor.table.check()


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path, open_model: Open) -> None:
    """The library has none of them; a layer that nobody counts is another matter."""
    model = gguf_toy.make("glm4_moe", dtype=torch.bfloat16)
    more = {"blk.4.nextn.eh_proj.weight": torch.ones(64, 128), "blk.4.ffn_up_exps.weight": torch.ones(8, 32, 64)}
    path = gguf_toy.write(tmp_path / "toy.gguf", model, tensors=more)
    assert all(map(torch.equal, steps(open_model(path, "half"), PROMPT), steps(model, PROMPT)))
    path = gguf_toy.write(tmp_path / "odd.gguf", model, tensors={"blk.5.attn_q.weight": torch.ones(64, 64)})
    with pytest.raises(UnsupportedModelError, match=r"'blk.5.attn_q.weight'.*does not have"):
        from_pretrained(path, memory="64MiB")


def test_a_router_without_its_correction_is_refused(tmp_path: Path) -> None:
    absent = {"blk.2.exp_probs_b.bias": None}
    path = gguf_toy.write(tmp_path / "toy.gguf", gguf_toy.make("minimax_m2"), tensors=absent)
    with pytest.raises(CheckpointError, match=r"lacks 1 weights .* beginning with 'blk.2.exp_probs_b.bias'"):
        from_pretrained(path, memory="64MiB")


def test_positions_that_turn_part_of_a_head_are_refused_where_the_library_turns_all(tmp_path: Path) -> None:
    said = {"rope.dimension_count": 8}
    path = gguf_toy.write(tmp_path / "toy.gguf", gguf_toy.make("qwen3_moe"), metadata=said)
    with pytest.raises(UnsupportedModelError, match="rotate 8 of 16 dimensions of a head"):
        from_pretrained(path, memory="64MiB")


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.BF16], ids=lambda kind: kind.name)
def test_early_files_have_a_tensor_for_every_expert(kind: Type, tmp_path: Path, open_model: Open) -> None:
    model = zoo.make("mixtral", dtype=torch.float32)
    path = gguf_toy.write(tmp_path / "new.gguf", model, experts=kind, dense=kind)
    early = gguf_toy.write(tmp_path / "early.gguf", model, dense=kind, tensors=apart(model))
    assert "blk.3.ffn_up.7.weight" in checkpoint_at(early).tensors()
    ours, theirs = (steps(open_model(each, "half", dtype="float32"), PROMPT) for each in (early, path))
    assert all(map(torch.equal, ours, theirs))
    gguf_toy.take_weights(model, path)
    assert_near(ours, steps(model, PROMPT), 1e-4)


def apart(model: PreTrainedModel) -> dict[str, torch.Tensor | None]:
    """What is to be written in another way than now: each expert's matrices by themselves."""
    found: dict[str, torch.Tensor | None] = {}
    for key, weight in gguf_toy.tensors_of(model).items():
        if "_exps." in key:
            found[key] = None
            found |= {key.replace("_exps.", f".{expert}."): each for expert, each in enumerate(weight)}
    return found


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    model = zoo.make("mixtral")
    tensors = {**apart(model), "blk.2.ffn_up.5.weight": None}
    path = gguf_toy.write(tmp_path / "toy.gguf", model, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"has no 'blk.2.ffn_up.5.weight'.*incomplete"):
        from_pretrained(path, memory="64MiB")


def test_a_llama_without_experts_is_refused(tmp_path: Path) -> None:
    """As one for other programs, not as a damaged file."""
    model = zoo.make("mixtral")
    absent = dict.fromkeys(key for key in gguf_toy.tensors_of(model) if "_exps." in key or "gate_inp" in key)
    said = {"expert_count": None, "expert_used_count": None}
    path = gguf_toy.write(tmp_path / "toy.gguf", model, tensors=absent, metadata=said)
    with pytest.raises(NotMoEError, match=r"'llama' that has no routed experts.*; give another file"):
        from_pretrained(path, memory="64MiB")


PIECES = ["<unk>", "<s>", "</s>", "▁", *"abcdehlor,", "▁h", "▁he", "ll", "▁hell", "lo", "or", "▁hello", "▁a"]


def add_pieces(writer: gguf.GGUFWriter) -> None:
    """A vocabulary with scores, as Mixtral's."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(PIECES)
    writer.add_token_scores([-float(n) for n in range(len(PIECES))])
    writer.add_token_types([gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[1] * (len(PIECES) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_a_vocabulary_with_scores(tmp_path: Path) -> None:
    """Begins every text with its first token, also where the file does not say so."""
    path = gguf_toy.write(tmp_path / "toy.gguf", zoo.make("mixtral"), tokenizer=add_pieces)
    ours, theirs = checkpoint_at(path).tokenizer(), AutoTokenizer.from_pretrained(tmp_path, gguf_file="toy.gguf")
    # theirs drops one space of a text that begins with one, puts none before a text after a control token, and leaves
    # out characters that the vocabulary lacks
    for text in ("hello a", "a</s>", ""):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
        assert ours.decode(ours(text)["input_ids"]) == theirs.decode(theirs(text)["input_ids"]), text
    assert ours("hello a")["input_ids"] == [1, PIECES.index("▁hello"), PIECES.index("▁a")]
    assert ours("  hello")["input_ids"] == [1, PIECES.index("▁"), PIECES.index("▁"), PIECES.index("▁hello")]
    assert ours("a\n")["input_ids"] == [1, PIECES.index("▁a"), 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_says_how_its_family_splits_texts(family: str, tmp_path: Path) -> None:
    path = gguf_toy.write(tmp_path / "toy.gguf", gguf_toy.make(family), experts=Type.Q8_0)
    assert read_gguf_header(path).metadata["tokenizer.ggml.pre"] == gguf_toy.SPLITS.get(family, "qwen2")
    said = repr(checkpoint_at(path).tokenizer().backend_tokenizer.pre_tokenizer)
    silent = gguf_toy.write(tmp_path / "silent.gguf", gguf_toy.make(family), experts=Type.Q8_0, split=None)
    assert repr(checkpoint_at(silent).tokenizer().backend_tokenizer.pre_tokenizer) == said


_NAMES = (
    "afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 "
    "deepseek4 dflash dots1 dots3note ernie4_5-moe exaone-moe gemma4 glm-dsa glm4moe glm5-next gpt-oss granite_swa "
    "granitehybrid granitemoe grok grovemoe hunyuan-moe hy_v3 hy_v4 jamba kimi-k3 kimi-linear laguna lfm2moe llada-moe "
    "llama llama-embed llama4 maple mellum mimo2 minicpm minimax-01 minimax-m2 minimax-m3 mistral3 mistral4 "
    "nemotron_h_moe nomic-bert-moe olmoe phimoe qwen2moe qwen35moe qwen3moe qwen3next qwen3vlmoe qwen4exp rnd1 "
    "smallthinker step35"
)
WITH_EXPERTS = set(_NAMES.split())
"""The architectures of llama.cpp whose tables have a router (state of llama-cpp-python 0.3.36)."""


def header_of(metadata: dict[str, Any]) -> GgufHeader:
    """The header of a file with these entries and no tensors."""
    return GgufHeader(Path("toy.gguf"), FileIdentity(0, 0, 0, 0), metadata, (), 0, 32)


@pytest.mark.parametrize("architecture", sorted(WITH_EXPERTS - gguf_families.FAMILIES.keys()))
def test_every_other_architecture_with_experts_is_refused_with_a_reason(architecture: str) -> None:
    header = header_of({"general.architecture": architecture, f"{architecture}.expert_count": 8})
    with pytest.raises(UnsupportedModelError, match=f"'{architecture}', which smoe does not read: .{{12,}}"):
        gguf_families.architecture_of(header)


PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def test_the_files_that_people_use_are_computed_by_the_families_that_the_page_names() -> None:
    """Of at least 18 of the 20 repositories in docs/families.md; the others are refused."""
    runs = 0
    for line in PAGE.read_text("utf-8").splitlines():
        row = re.fullmatch(r"\| `\S+/\S+-GGUF`.* \| `(\S+)` \| `(\w+)`.* \| (yes|no: .+) \|", line)
        if row is not None and row[3] == "yes":
            assert gguf_families.FAMILIES[row[1]].model_type == row[2], line
            runs += 1
        elif row is not None:
            assert row[1] not in gguf_families.FAMILIES, line
    assert 18 <= runs <= 20


@pytest.mark.parametrize("architecture", ["gemma3", "mistral3", "qwen3"])
def test_a_dense_model_is_no_unknown_one(architecture: str) -> None:
    with pytest.raises(NotMoEError, match=f"'{architecture}' that has no routed experts"):
        gguf_families.architecture_of(header_of({"general.architecture": architecture}))


@pytest.mark.parametrize(("kind", "what"), [("adapter", "an adapter"), ("imatrix", "an importance matrix")])
def test_a_file_of_another_type_is_no_model(kind: str, what: str) -> None:
    header = header_of({"general.architecture": "qwen3moe", "general.type": kind})
    with pytest.raises(UnsupportedModelError, match=f"is not a model, but {what}"):
        gguf_families.architecture_of(header)
