"""GGUF files whose matrices are not the library's, beside the library's model with the same weights.

Would catch: rows or columns in another order, one of the parts of a weight exchanged with another, an entry of the
metadata that is not read, a size that `smoe plan` does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from smoe import from_pretrained
from smoe.errors import CheckpointError, SmoeError, UnsupportedModelError
from smoe.memory.gguf_header import read_gguf_header
from smoe.models.checkpoint import checkpoint_at
from smoe.models.gguf_config import entries_of, gguf_fields
from smoe.models.gguf_families import family_of
from smoe.models.model_sizes import model_sizes
from smoe.models.quantised_linear import QuantisedLinear
from smoe.models.read_spec import read_spec
from smoe.presets import configure
from tests import families, gguf_toy, zoo
from tests import gguf_converted as converted
from tests.gguf_windowed import TOYS
from tests.models.test_gguf_quantised import PROMPT, assert_near, steps

Open = Callable[..., PreTrainedModel]
UNSAID = {
    "_name_or_path",
    "architectures",
    "dtype",
    "initializer_range",
    "use_cache",
    "model_type",
    "transformers_version",
}
UNSAID |= {"bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "vocab_size", "output_router_logits"}
UNSAID |= {"router_aux_loss_coef"}


class Toy(NamedTuple):
    """A model of 16 bits and its file of 32, for tests that change neither."""

    family: converted.Architecture
    model: PreTrainedModel
    path: Path


@pytest.fixture(scope="module", params=TOYS)
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Made once, for one test after the other."""
    family = TOYS[request.param]
    model = converted.make(family, torch.bfloat16)
    return Toy(family, model, converted.write(tmp_path_factory.mktemp("toy") / "toy.gguf", family, model))


def test_every_bit_is_the_librarys(toy: Toy, open_model: Open) -> None:
    """In a model of 16 bits of a file of 32, also where weights have 32 in the library."""
    assert all(map(torch.equal, steps(open_model(toy.path, "half"), PROMPT), steps(toy.model, PROMPT)))


def test_quantised_matrices_are_the_same_numbers(toy: Toy, tmp_path: Path, open_model: Open) -> None:
    """In Q8_0, whichever of them are put together or turned round."""
    model = converted.make(toy.family)
    path = converted.write(tmp_path / "toy.gguf", toy.family, model, Type.Q8_0)
    ours = open_model(path, "half", dtype="float32")
    assert_near(steps(ours, PROMPT), steps(model, PROMPT), 1e-4)


def test_the_configuration_is_the_models(toy: Toy) -> None:
    config = checkpoint_at(toy.path).config()
    ours, theirs = config.to_dict(), toy.model.config.to_dict()
    if config.model_type != toy.model.config.model_type:
        return  # of another class that computes the same
    unused = UNSAID | toy.family.unsaid
    differing = {key: (ours[key], theirs[key]) for key in theirs.keys() - unused if not same(ours[key], theirs[key])}
    assert not differing


def same(ours: Any, theirs: Any) -> bool:
    """Equal, but for the rounding of numbers that files have in 32 bits."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(ours, float) and isinstance(theirs, float):
        return ours == pytest.approx(theirs)
    return bool(ours == theirs)


def test_sizes_are_those_of_the_safetensors_release(toy: Toy, tmp_path: Path) -> None:
    toy.model.save_pretrained(tmp_path / "folder")
    path = converted.write(tmp_path / "toy.gguf", toy.family, toy.model, Type.BF16)
    ours, theirs = (read_spec(place, configure(context_tokens=32)) for place in (path, tmp_path / "folder"))
    assert ours.weights_bytes == theirs.weights_bytes and ours.experts_bytes == theirs.experts_bytes
    assert ours.anatomy == theirs.anatomy


def test_matrices_whose_rows_move_stay_quantised(tmp_path: Path, open_model: Open) -> None:
    """Where all parts are of one format; what is turned round, or made of two formats, is unpacked."""
    family = converted.QWEN3_NEXT
    model = converted.make(family)
    path = converted.write(tmp_path / "toy.gguf", family, model, Type.Q8_0)
    mixer = open_model(path, "half", dtype="float32").model.layers[0].linear_attn
    assert isinstance(mixer.in_proj_qkvz, QuantisedLinear) and isinstance(mixer.out_proj, QuantisedLinear)
    mixed = converted.write(tmp_path / "mixed.gguf", family, model, Type.Q8_0, wide="attn_gate|ffn_gate_inp|ssm_ba")
    ours = open_model(mixed, "half", dtype="float32")
    assert not isinstance(ours.model.layers[0].linear_attn.in_proj_qkvz, QuantisedLinear)
    assert_near(steps(ours, PROMPT), steps(model, PROMPT), 1e-4)


@pytest.mark.parametrize("name", ["qwen35moe", "qwen3next", "deepseek2 V3", "deepseek2 GLM-4.7-Flash"])
def test_layers_that_guess_further_tokens_are_left_out(name: str, tmp_path: Path, open_model: Open) -> None:
    family = TOYS[name]
    model = converted.make(family)
    more = {"metadata": {"block_count": 5, "nextn_predict_layers": 1}}
    tensors = {"blk.4.nextn.eh_proj.weight": torch.ones(64, 128), "blk.4.attn_q.weight": torch.ones(8, 64)}
    path = converted.write(tmp_path / "toy.gguf", family, model, tensors=tensors, **more)
    assert checkpoint_at(path).config().num_hidden_layers == 4
    ours = open_model(path, "half", dtype="float32")
    assert_near(steps(ours, PROMPT), steps(model, PROMPT), 1e-4)


def test_mimo_as_published_later(tmp_path: Path, open_model: Open) -> None:
    """Queries, keys and values in one matrix, as different as the layers are, and layers that guess further tokens."""
    family = TOYS["mimo2"]
    model = converted.make(family)
    tensors: dict[str, torch.Tensor | None] = {"blk.5.nextn.eh_proj.weight": torch.ones(64, 128)}
    for number, layer in enumerate(model.model.layers):
        parts = [getattr(layer.self_attn, f"{kind}_proj").weight.detach() for kind in "qkv"]
        tensors |= {f"blk.{number}.attn_{kind}.weight": None for kind in "qkv"}
        tensors[f"blk.{number}.attn_qkv.weight"] = torch.cat(parts)
    more = {
        "attention.head_count_kv": [2, 4, 4, 4, 4, 4],
        "attention.sliding_window_pattern": [0, 1, 1, 1, 1, 1],
        "block_count": 6,
        "nextn_predict_layers": 2,
    }
    path = converted.write(tmp_path / "toy.gguf", family, model, tensors=tensors, metadata=more)
    ours = open_model(path, "half", dtype="float32")
    assert_near(steps(ours, PROMPT), steps(model, PROMPT), 1e-4)


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("laguna XS", None, "fsss"),
        ("laguna XS", 2, "sfsf"),
        ("laguna XS", [True, False, False, True], "sffs"),
        ("cohere2moe", None, "sssf"),
        ("mellum", None, "sssf"),
    ],
)
def test_which_layers_have_a_window(name: str, pattern: Any, expected: str, tmp_path: Path) -> None:
    """Of a list, of a period, and of files that have neither."""
    family = TOYS[name]
    changed = {"attention.sliding_window_pattern": pattern}
    path = converted.write(tmp_path / "toy.gguf", family, converted.make(family), metadata=changed)
    assert "".join(kind[0] for kind in checkpoint_at(path).config().layer_types) == expected


def test_rows_that_no_logit_shows(tmp_path: Path, open_model: Open) -> None:
    """Nemotron has no positions, so queries and keys whose rows moved alike have the same products."""
    family = TOYS["nemotron_h_moe Nano"]
    model = converted.make(family)
    path = converted.write(tmp_path / "toy.gguf", family, model)
    ours, theirs = (each.model.layers[2].mixer for each in (open_model(path, "full", dtype="float32"), model))
    assert torch.equal(ours.q_proj.weight, theirs.q_proj.weight) and torch.equal(
        ours.k_proj.weight, theirs.k_proj.weight
    )


def test_early_files_of_latent_attention(tmp_path: Path, open_model: Open) -> None:
    """Keys and values in one matrix, as many heads of each as of queries, and nothing of a router's scores."""
    family = converted.DEEPSEEK_V3
    model = converted.make(family)
    whole = {
        f"blk.{n}.attn_kv_b.weight": layer.self_attn.kv_b_proj.weight for n, layer in enumerate(model.model.layers)
    }
    parts = dict.fromkeys(f"blk.{n}.attn_{kind}_b.weight" for n in range(4) for kind in "kv")
    early = {
        "attention.head_count_kv": 4,
        "attention.key_length": 40,
        "attention.value_length": 16,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
        "expert_gating_func": None,
    }
    path = converted.write(tmp_path / "toy.gguf", family, model, tensors={**parts, **whole}, metadata=early)
    ours = open_model(path, "half", dtype="float32")
    assert_near(steps(ours, PROMPT), steps(model, PROMPT), 1e-4)


def test_parts_that_do_not_make_the_weight(tmp_path: Path) -> None:
    family = converted.DEEPSEEK_V3
    odd = {"blk.1.attn_v_b.weight": torch.ones(4, 8, 32)}
    path = converted.write(tmp_path / "toy.gguf", family, converted.make(family), tensors=odd)
    with pytest.raises(CheckpointError, match=r"'blk.1.attn_k_b.weight', 'blk.1.attn_v_b.weight'.*have the shapes"):
        from_pretrained(path, memory="64MiB")
    path = converted.write(
        tmp_path / "less.gguf", family, converted.make(family), tensors={"blk.1.attn_v_b.weight": None}
    )
    with pytest.raises(CheckpointError, match=r"lacks 1 weights .* beginning with 'blk.1.attn_v_b.weight'"):
        from_pretrained(path, memory="64MiB")


def test_numbers_that_the_library_computes_are_compared(tmp_path: Path) -> None:
    """Gemma 4's frequencies: of a file with others the text would be another."""
    family = converted.GEMMA4
    other = {"rope_freqs.weight": torch.tensor([1.0] * 8 + [1e30] * 8)}
    path = converted.write(tmp_path / "toy.gguf", family, converted.make(family), tensors=other)
    with pytest.raises(UnsupportedModelError, match=r"'rope_freqs.weight' has other values"):
        from_pretrained(path, memory="64MiB", context_tokens=32)


def test_tensors_for_images_are_left_out(tmp_path: Path) -> None:
    """A second correction of DeepSeek-V4's routers, which only images use."""
    family = converted.DEEPSEEK_V4
    more = {"blk.1.exp_probs_b_vl.bias": torch.ones(8)}
    path = converted.write(tmp_path / "toy.gguf", family, converted.make(family), tensors=more)
    described, spec = model_sizes(path, configure(context_tokens=32))
    assert described.experts(spec).keys() == {0, 1, 2, 3}


def test_the_text_part_of_a_model_of_images(tmp_path: Path, open_model: Open) -> None:
    """Qwen3-VL, with three positions for every token."""
    library = families.eager(AutoModelForImageTextToText.from_config, families.config_of("qwen3_vl_moe"), torch.float32)
    zoo.fill(library, torch.float32)
    config, tensors = library.config.text_config, {}
    for name, weight in library.state_dict().items():
        layer = re.fullmatch(r"model\.language_model\.layers\.(\d+)\.(.*)", name)
        if layer is not None:
            found = converted.usual(layer[2], weight, config)
            tensors |= {f"blk.{layer[1]}.{key}": each for key, each in found}
        elif ".visual." not in name:
            tensors |= dict(converted.usual(name.replace("language_model.", ""), weight, config))
    metadata = {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "n_deepstack_layers": 3,
        "rope.dimension_sections": [*config.rope_parameters["mrope_section"], 0],
    }
    path = gguf_toy.write_file(
        tmp_path / "toy.gguf",
        "qwen3vlmoe",
        converted.common(config) | metadata,
        tensors,
        experts=Type.F32,
        dense=Type.F32,
    )
    ours = open_model(path, "half", dtype="float32")
    ids = PROMPT.clamp(max=110)  # without the numbers that stand for images
    assert_near(steps(ours, ids), steps(library, ids), 1e-4)


@pytest.mark.parametrize("name", ["deepseek", "bailingmoe"])
def test_a_class_of_our_own_is_registered_with_the_library(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process that has read no such model before; making the toy has registered the class."""
    family = TOYS[name]
    path = converted.write(tmp_path / "toy.gguf", family, converted.make(family))
    for mapping in (CONFIG_MAPPING, AutoModelForCausalLM._model_mapping):
        own = {key: each for key, each in mapping._extra_content.items() if family.model_type not in (key, _type(key))}
        monkeypatch.setattr(mapping, "_extra_content", own)
    read_spec(path, configure(context_tokens=32))


def _type(key: Any) -> str:
    """The `model_type` of a configuration class."""
    return str(getattr(key, "model_type", ""))


def test_entries_that_are_missing_or_odd_are_errors_or_harmless(toy: Toy) -> None:
    header = read_gguf_header(toy.path)
    entries = entries_of(header, checkpoint_at(toy.path).tensors())
    for key in entries.values:
        others = {other: value for other, value in entries.values.items() if other != key}
        for odd in (None, 0, -1, 2**40, "x", [], [1], True):
            changed = entries._replace(values=others if odd is None else {**others, key: odd})
            with suppress(SmoeError):
                gguf_fields(header, family_of(changed), changed)


def test_parts_of_a_matrix_take_its_bytes_together(tmp_path: Path) -> None:
    """Queries, keys and values of Ling, which files have in one."""
    family = converted.BAILING
    path = converted.write(tmp_path / "toy.gguf", family, converted.make(family), Type.Q8_0)
    dense, whole = read_spec(path, configure(context_tokens=32)).dense, checkpoint_at(path).tensors()
    parts = [dense[f"model.layers.0.self_attn.{kind}_proj.weight"] for kind in "qkv"]
    assert [part.shape for part in parts] == [(64, 64), (32, 64), (32, 64)]
    assert sum(part.nbytes for part in parts) == whole["blk.0.attn_qkv.weight"].nbytes


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("bailingmoe3", {"swiglu_clamp_exp": [0.0, 0.0, 7.0, 0.0]}, "limits the outputs of its experts' gates"),
        ("glm5-next", {"swiglu_clamp_shexp": [0.0] * 4}, r"shared experts to \[0.0\].*has one limit for all"),
        ("qwen4exp", {"ple.layers": [0, 2]}, "tables in 2 layers"),
        ("jamba", {"attention.head_count_kv": [2, 2, 0, 2]}, r"attention in the layers \[0, 1, 3\]"),
        ("llama4 Scout", {"attention.sliding_window": 0}, "'llama4.attention.sliding_window' is 0"),
        ("deepseek4", {"expert_gating_func": 2}, "'deepseek4.expert_gating_func' is 2"),
        ("deepseek2 V2", {"expert_weights_norm": True}, "'deepseek2.expert_weights_norm' is True"),
        ("hy_v3", {"expert_weights_norm": False}, "'hy_v3.expert_weights_norm' is False"),
        ("mimo2", {"attention.head_count_kv": [2, 2, 2, 2]}, "twice as many in layers with a window"),
        ("cohere2moe with softmax", {"expert_weights_norm": False}, "normalises the weights of such a router"),
    ],
)
def test_what_the_librarys_class_does_not_compute_is_refused(
    name: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    family = TOYS[name]
    path = converted.write(tmp_path / "toy.gguf", family, converted.make(family), metadata=changed)
    with pytest.raises(UnsupportedModelError, match=message):
        checkpoint_at(path).config()
