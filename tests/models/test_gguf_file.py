"""The same toy as safetensors, in memory and as a GGUF file: one model, bit for bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from smoe import from_pretrained
from smoe.errors import CheckpointError, ConfigError, SmoeError, UnsupportedModelError
from smoe.memory import gguf_header
from smoe.memory.gguf_header import read_gguf_header
from smoe.models import files
from smoe.models.checkpoint import checkpoint_at
from tests import gguf_toy, oracle, zoo

Open = Callable[..., PreTrainedModel]
FAMILIES = ("qwen2_moe", "qwen3_moe")
"""The others are in test_gguf_families.py."""
PLAIN = (Type.F32, Type.F16, Type.BF16)


@pytest.mark.parametrize("budget", ["full", "minimum"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_model_that_was_written(
    family: str, budget: str, toy: Callable[..., Path], tmp_path: Path, open_model: Open
) -> None:
    """bf16, beside the safetensors of the same weights; would catch gate and up exchanged, and a name mistaken."""
    folder = toy(family, dtype=torch.bfloat16)
    path = gguf_toy.write(tmp_path / "toy.gguf", oracle.reference(folder))
    theirs = oracle.reference_steps(folder)
    oracle.assert_same_steps(oracle.greedy(open_model(folder, budget)), theirs)
    ours = open_model(path, budget)
    assert ours.dtype is torch.bfloat16 and ours.name_or_path == str(path) == ours.config.name_or_path
    oracle.assert_same_steps(oracle.greedy(ours), theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_fp32_in_fp32(family: str, tmp_path: Path, open_model: Open) -> None:
    """Beside the model in memory: no rounding may come in between."""
    model = zoo.make(family)
    path = gguf_toy.write(tmp_path / "toy.gguf", model, experts=Type.F32, dense=Type.F32)
    for budget in ("full", "minimum"):
        ours = oracle.greedy(open_model(path, budget, dtype="float32"))
        oracle.assert_same_steps(ours, oracle.greedy(model))


@pytest.mark.parametrize("experts", PLAIN, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dense", [Type.Q8_0, Type.Q4_0, Type.F16], ids=lambda kind: kind.name)
def test_quantised_dense_weights_are_the_dequantised_ones(
    dense: Type, experts: Type, tmp_path: Path, open_model: Open
) -> None:
    """Beside the library's model with what the gguf package makes of the file."""
    model = zoo.make("qwen2_moe", dtype=torch.bfloat16, shared_expert_intermediate_size=64)  # whole blocks
    path = gguf_toy.write(tmp_path / "toy.gguf", model, experts=experts, dense=dense)
    gguf_toy.take_weights(model, path)
    oracle.assert_same_steps(oracle.greedy(open_model(path, "half")), oracle.greedy(model))


def test_gate_and_up_in_one_tensor(tmp_path: Path, open_model: Open) -> None:
    model = zoo.make("qwen3_moe", dtype=torch.bfloat16)
    path = gguf_toy.write(tmp_path / "toy.gguf", model, fused=True)
    oracle.assert_same_steps(oracle.greedy(open_model(path, "half")), oracle.greedy(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings_are_stored_once(family: str, tmp_path: Path, open_model: Open) -> None:
    model = zoo.make(family, dtype=torch.bfloat16, tie_word_embeddings=True)
    path = gguf_toy.write(tmp_path / "toy.gguf", model)
    assert "output.weight" not in checkpoint_at(path).tensors()
    ours = open_model(path, "half")
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    oracle.assert_same_steps(oracle.greedy(ours), oracle.greedy(model))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions(kind: str, tmp_path: Path, open_model: Open) -> None:
    scaling = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    said: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = 64
        said["rope.scaling.original_context_length"] = 64
    model = zoo.make("qwen3_moe", dtype=torch.bfloat16, rope_parameters=scaling)
    path = gguf_toy.write(tmp_path / "toy.gguf", model, metadata=said)
    oracle.assert_same_steps(oracle.greedy(open_model(path, "half")), oracle.greedy(model))


def test_weights_that_are_made_to_sum_to_one(tmp_path: Path, open_model: Open) -> None:
    """qwen2_moe leaves them as they are where its file does not say otherwise."""
    model = zoo.make("qwen2_moe", dtype=torch.bfloat16, norm_topk_prob=True)
    path = gguf_toy.write(tmp_path / "toy.gguf", model, metadata={"expert_weights_norm": True})
    oracle.assert_same_steps(oracle.greedy(open_model(path, "half")), oracle.greedy(model))


def test_a_model_in_parts(tmp_path: Path, open_model: Open) -> None:
    """The matrix of the output lies in another part than the metadata, and from any part the model is the same."""
    model = zoo.make("qwen2_moe", dtype=torch.bfloat16)
    first = gguf_toy.write(tmp_path / "toy.gguf", model, parts=3)
    assert first.name == "toy-00001-of-00003.gguf"
    last = first.with_name("toy-00003-of-00003.gguf")
    oracle.assert_same_steps(oracle.greedy(from_pretrained(last, memory="64MiB")), oracle.greedy(model))
    last.unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 3 parts.*toy-00003"):
        from_pretrained(first)


def test_nothing_stays_mapped(tmp_path: Path, open_model: Open) -> None:
    path = gguf_toy.write(tmp_path / "toy.gguf", zoo.make("qwen3_moe", dtype=torch.bfloat16))
    model = open_model(path, "half")
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_library_reads_the_same_configuration(family: str, tmp_path: Path) -> None:
    """As far as it reads one: the width of the experts it leaves to chance."""
    path = gguf_toy.write(tmp_path / "toy.gguf", zoo.make(family, moe_intermediate_size=64))
    ours = checkpoint_at(path).config().to_dict()
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="toy.gguf").to_dict()
    own = {"moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size", "_name_or_path", "eos_token_id"}
    assert {k: v for k, v in ours.items() if k not in own} == {k: v for k, v in theirs.items() if k not in own}
    assert ours["moe_intermediate_size"] == 64


def test_sizes_that_a_file_does_not_say_are_those_of_its_tensors(tmp_path: Path) -> None:
    """Early converters wrote no width of the experts."""
    left_out = ("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_count")
    model = zoo.make("qwen2_moe")
    path = gguf_toy.write(tmp_path / "toy.gguf", model, metadata=dict.fromkeys(left_out))
    config = checkpoint_at(path).config()
    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size, config.num_experts) == (32, 48, 8)


def test_the_tokenizer_is_the_librarys(tmp_path: Path) -> None:
    path = gguf_toy.write(tmp_path / "toy.gguf", zoo.make("qwen3_moe"))
    ours, theirs = checkpoint_at(path).tokenizer(), AutoTokenizer.from_pretrained(tmp_path, gguf_file="toy.gguf")
    for text in ("Hello  ~~~ world\n", f"a{gguf_toy.END}b<|im_start|>user", ""):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == theirs.decode(theirs(text)["input_ids"])
    assert ours.special_tokens_map == theirs.special_tokens_map and ours.chat_template == theirs.chat_template
    said = ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert said == "user: hi\nassistant:" and ours.name_or_path == str(path)


def test_texts_are_split_as_the_file_says(tmp_path: Path) -> None:
    """Where it says nothing, as the family does; what nobody knows is refused, or tokens would be others in silence."""
    model, path = zoo.make("qwen3_moe"), tmp_path / "toy.gguf"
    said = checkpoint_at(gguf_toy.write(path, model)).tokenizer().backend_tokenizer.pre_tokenizer
    silent = checkpoint_at(gguf_toy.write(path, model, split=None)).tokenizer().backend_tokenizer.pre_tokenizer
    assert repr(said) == repr(silent)
    with pytest.raises(UnsupportedModelError, match="splits texts by 'unheard-of'"):
        checkpoint_at(gguf_toy.write(path, model, split="unheard-of")).tokenizer()


def test_a_text_ends_where_the_file_says_so(tmp_path: Path, open_model: Open) -> None:
    model = zoo.make("qwen3_moe", dtype=torch.bfloat16)
    more = {"tokenizer.ggml.eot_token_id": 98, "general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    plain = open_model(gguf_toy.write(tmp_path / "plain.gguf", model), "half").generation_config
    assert (plain.eos_token_id, bool(plain.do_sample)) == (96, False)
    told = open_model(gguf_toy.write(tmp_path / "told.gguf", model, more=more), "half").generation_config
    assert (told.eos_token_id, told.do_sample, told.temperature, told.top_k) == ([96, 98], True, 0.5, 7)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


REFUSED: dict[str, tuple[dict[str, Any], type[SmoeError], str]] = {
    "another family": ({"architecture": "falcon"}, UnsupportedModelError, "architecture 'falcon', which smoe does not"),
    "a size missing": ({"metadata": {"block_count": None}}, CheckpointError, "lacks .* 'qwen3moe.block_count'"),
    "a size of a text": ({"metadata": {"block_count": "4"}}, CheckpointError, "'block_count' should be one number"),
    "layers without end": ({"metadata": {"block_count": 2**31}}, CheckpointError, "'num_hidden_layers' is 2147483648"),
    "experts without end": ({"metadata": {"expert_count": 2**30}}, CheckpointError, "'num_experts' is 1073741824"),
    "one layer too many": ({"metadata": {"block_count": 5}}, CheckpointError, "has no 'blk.4.ffn_gate_exps"),
    "one layer too few": (
        {"metadata": {"block_count": 3}},
        UnsupportedModelError,
        "holds the tensor 'blk.3.*does not have",
    ),
    "more experts": (
        {"metadata": {"expert_count": 16}},
        CheckpointError,
        r"shape \[8, 32, 64\].*metadata it has the shape \[16, 32, 64\]",
    ),
    "more choices": (
        {"metadata": {"expert_used_count": 9}},
        CheckpointError,
        "'num_experts_per_tok' is 9.* 8, the value of",
    ),
    "another width": (
        {"metadata": {"expert_feed_forward_length": 64}},
        CheckpointError,
        r"ffn_gate_exps.*metadata it has the shape \[8, 64, 64\]",
    ),
    "another router": ({"metadata": {"expert_gating_func": 2}}, UnsupportedModelError, "expert_gating_func' is 2"),
    "scaled weights": ({"metadata": {"expert_weights_scale": 2.5}}, UnsupportedModelError, "weights_scale' is 2.5"),
    "odd positions": ({"metadata": {"rope.scaling.type": "longrope"}}, UnsupportedModelError, "method 'longrope'"),
    "positions by nothing": ({"metadata": {"rope.scaling.type": "yarn"}}, CheckpointError, "factor is None"),
    "an odd end": ({"more": {"tokenizer.ggml.eot_token_id": "x"}}, CheckpointError, "eot_token_id' is 'x'"),
    "an odd temperature": ({"more": {"general.sampling.temp": -1.0}}, CheckpointError, "'temperature' is -1.0"),
    "a norm missing": (
        {"tensors": {"output_norm.weight": None}},
        CheckpointError,
        "lacks 1 weights .* beginning with 'output_norm",
    ),
    "experts missing": ({"tensors": {"blk.1.ffn_up_exps.weight": None}}, CheckpointError, "has no 'blk.1.ffn_up_exps"),
    "embeddings missing": ({"tensors": {"token_embd.weight": None}}, CheckpointError, "no tensor 'token_embd.weight'"),
    "no router": (
        {"tensors": {"blk.2.ffn_gate_inp.weight": None}},
        CheckpointError,
        "lacks 1 weights .* beginning with 'blk.2.ffn_gate_inp.weight'",
    ),
    "a bias too many": ({"tensors": {"blk.0.attn_q.bias": ones(64)}}, UnsupportedModelError, "'blk.0.attn_q.bias'"),
    "factors of positions": ({"tensors": {"rope_freqs.weight": ones(8)}}, UnsupportedModelError, "'rope_freqs.weight'"),
    "a turned matrix": (
        {"tensors": {"blk.0.attn_k.weight": ones(64, 32)}},
        CheckpointError,
        r"'blk.0.attn_k.weight'.*\[64, 32\]",
    ),
    "turned experts": (
        {"tensors": {"blk.0.ffn_down_exps.weight": ones(8, 32, 64)}},
        CheckpointError,
        r"'blk.0.ffn_down_exps.weight'.*\[8, 32, 64\].*metadata it has the shape \[8, 64, 32\]",
    ),
    "NaN": (
        {"tensors": {"blk.2.attn_norm.weight": torch.full((64,), float("nan"))}},
        CheckpointError,
        "'blk.2.attn_norm.weight'.*holds NaN",
    ),
    "NaN in an expert": (
        {"tensors": {"blk.0.ffn_up_exps.weight": torch.full((8, 32, 64), float("nan"))}},
        CheckpointError,
        "'blk.0.ffn_up_exps.weight'.*holds NaN",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(name: str, tmp_path: Path) -> None:
    options, kind, said = REFUSED[name]
    path = gguf_toy.write(tmp_path / "toy.gguf", zoo.make("qwen3_moe", dtype=torch.bfloat16), **options)
    with pytest.raises(kind, match=said) as error:
        from_pretrained(path, memory="64MiB")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_quantised_experts_are_indexed(tmp_path: Path) -> None:
    """Whether they are served is the store's to say; where they lie is known."""
    model = zoo.make("qwen3_moe", dtype=torch.bfloat16)
    path = gguf_toy.write(tmp_path / "toy.gguf", model, experts=Type.Q8_0)
    tensor = checkpoint_at(path).tensors()["blk.0.ffn_down_exps.weight"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("Q8_0", (8, 64, 32), 8 * 64 * 34)


def test_a_folder_of_one_file_is_that_file(tmp_path: Path) -> None:
    for name in ("toy.gguf", "mmproj-toy.gguf", "README.md"):
        (tmp_path / name).touch()
    assert files.local_place(tmp_path) == tmp_path / "toy.gguf"
    (tmp_path / "toy-Q8_0-00002-of-00002.gguf").touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF models: give the path of one of toy-Q8_0-00002.*, toy.gguf"):
        files.local_place(tmp_path)
    (tmp_path / "toy.gguf").unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of 2 parts"):
        files.local_place(tmp_path)


def test_files_that_only_go_with_a_model_are_skipped_with_a_remark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    companions = ("mmproj-toy-F16.gguf", "toy-imatrix.gguf", "mtp-toy-Q8_0.gguf")
    for name in ("toy-MTP-Q8_0.gguf", *companions):
        (tmp_path / name).touch()
    with caplog.at_level(logging.WARNING, "smoe"):
        assert files.local_place(tmp_path) == files.local_place(tmp_path) == tmp_path / "toy-MTP-Q8_0.gguf"
    assert len(caplog.records) == 1 and all(name in caplog.text for name in companions)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_split_model_is_opened_from_any_part(number: int, tmp_path: Path) -> None:
    first = gguf_toy.write(tmp_path / "toy.gguf", zoo.make("qwen3_moe"), parts=3)
    part = first.with_name(first.name.replace("00001-of", f"{number:05}-of"))
    assert part.exists() and files.local_place(part) == first


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("grok", "transformers has no class"),
        ("clip", "sees images"),
        ("dflash", "draft model"),
        ("rnd1", "by diffusion"),
        ("step35", "does not expose its experts"),
    ],
)
def test_architectures_that_cannot_run_are_refused_with_the_reason(
    architecture: str, reason: str, tmp_path: Path
) -> None:
    path = gguf_toy.write(tmp_path / "toy.gguf", zoo.make("qwen3_moe"), architecture=architecture)
    with pytest.raises(UnsupportedModelError, match=f"architecture '{architecture}'.*{reason}"):
        from_pretrained(path, memory="64MiB")


def test_entries_that_are_not_known_are_ignored(tmp_path: Path) -> None:
    more = {"qwen3moe.of_tomorrow": 7, "general.of_tomorrow": "x", "tokenizer.of_tomorrow": True}
    path = gguf_toy.write(tmp_path / "toy.gguf", zoo.make("qwen3_moe"), more=more)
    assert checkpoint_at(path).config().num_experts == 8 and checkpoint_at(path).tokenizer()("a")


def test_a_file_that_says_how_a_model_was_quantised_is_none(tmp_path: Path) -> None:
    path = gguf_toy.write(tmp_path / "toy.gguf", zoo.make("qwen3_moe"), more={"general.type": "imatrix"})
    with pytest.raises(UnsupportedModelError, match="not a model, but an importance matrix"):
        from_pretrained(path, memory="64MiB")


def test_a_folder_with_both_is_one_of_safetensors(tmp_path: Path) -> None:
    (tmp_path / "toy.gguf").touch()
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert files.local_place(tmp_path) == tmp_path / "toy.gguf"
    (tmp_path / "model.safetensors").touch()
    assert files.local_place(tmp_path) == tmp_path


def test_a_file_without_suffix_is_known_by_its_beginning(tmp_path: Path, open_model: Open) -> None:
    model = zoo.make("qwen3_moe", dtype=torch.bfloat16)
    path = gguf_toy.write(tmp_path / "toy.gguf", model).rename(tmp_path / "blob")
    oracle.assert_same_steps(oracle.greedy(open_model(path, "half")), oracle.greedy(model))


def test_nothing_is_to_be_packed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to pack"):
        checkpoint_at(tmp_path / "toy.gguf").check_gatherable()


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    """Its end is a token that there is not."""
    writer = gguf.GGUFWriter(tmp_path / "toy.gguf", "qwen3moe")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "aa"])
    writer.add_token_merges(["a a"])
    writer.add_eos_token_id(7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"no usable tokenizer.*eos_token_id is token 7"):
        checkpoint_at(tmp_path / "toy.gguf").tokenizer()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A file, and what its model says to a prompt."""
    model = zoo.make("qwen3_moe", dtype=torch.bfloat16)
    path = gguf_toy.write(tmp_path_factory.mktemp("whole") / "toy.gguf", model)
    with torch.no_grad():
        return path, model(oracle.PROMPT).logits


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_an_error_or_harmless(
    data: st.DataObject, whole: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    """A byte changed in the header, or the file cut: a named error, or a model that can be asked. (The header holds
    numbers that a file may well say, as the base of the positions: then another model is described.)"""
    good, logits = whole
    content = bytearray(good.read_bytes())
    end = read_gguf_header(good).data_offset
    is_cut = data.draw(st.booleans(), "cut")
    if is_cut:
        del content[data.draw(st.integers(0, len(content) - 1), "at") :]
    else:
        place = data.draw(st.integers(0, end - 1), "place")
        content[place] ^= data.draw(st.integers(1, 255), "bits")
    path = tmp_path / "changed.gguf"
    path.write_bytes(content)
    gguf_header._read_header.cache_clear()  # two examples within a tick of the clock look the same
    try:
        model = from_pretrained(path, memory="64MiB", context_tokens=oracle.CONTEXT)
    except SmoeError as error:
        assert str(error)
        return
    try:
        with torch.no_grad():
            found = model(oracle.PROMPT).logits
        assert not is_cut or torch.equal(found, logits)
    except SmoeError:
        pass
    finally:
        model.offload.close()
