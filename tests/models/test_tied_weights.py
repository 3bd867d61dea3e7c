"""Embeddings that config.json calls tied, beside transformers on the same files.

Would catch: the output matrix of a file left out of the plan, or taken for the embedding's; one of two equal ones kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from smoe.errors import CheckpointError
from smoe.models.checkpoint import checkpoint_at
from smoe.models.read_spec import read_spec
from smoe.presets import configure
from tests import gguf_toy, oracle, released_toy, zoo
from tests.models.test_gguf_quantised import assert_near, steps

Open = Callable[..., PreTrainedModel]
Change = Callable[[dict[str, torch.Tensor]], Any]
OUTPUT, INPUT = "lm_head.weight", "model.embed_tokens.weight"


def own_output(tensors: dict[str, torch.Tensor]) -> None:
    tensors[OUTPUT] = (
        torch.randn(tensors[INPUT].shape, generator=torch.Generator().manual_seed(1)).to(tensors[INPUT].dtype)
        / len(tensors[INPUT][0]) ** 0.5
    )


def same_output(tensors: dict[str, torch.Tensor]) -> None:
    tensors[OUTPUT] = tensors[INPUT].clone()


def output_alone(tensors: dict[str, torch.Tensor]) -> None:
    tensors[OUTPUT] = tensors.pop(INPUT)


def one_number(tensors: dict[str, torch.Tensor]) -> None:
    """The last of all, which a comparison of samples would not see."""
    same_output(tensors)
    tensors[OUTPUT][-1, -1] += 1


def lost_in_rounding(tensors: dict[str, torch.Tensor]) -> None:
    """Different in float32, and equal as they are loaded."""
    tensors[INPUT] = tensors[INPUT].bfloat16().float()
    tensors[OUTPUT] = tensors[INPUT] * (1 + 2**-16)


CHANGES: dict[str, tuple[Change, bool]] = {
    "another output matrix": (own_output, False),
    "one number differs": (one_number, False),
    "the same twice": (same_output, True),
    "the output matrix alone": (output_alone, True),
    "the embedding alone": (lambda tensors: None, True),
}
"""What a test does to the tensors of a tied model's file, and whether the library then shares them."""


def changed(folder: Path, change: Change, family: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16) -> Path:
    zoo.save(family, folder, dtype=dtype, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("what", CHANGES)
def test_the_file_decides_as_in_the_library(what: str, family: str, tmp_path: Path, open_model: Open) -> None:
    change, is_shared = CHANGES[what]
    folder = changed(tmp_path, change, family)
    theirs, ours = oracle.reference(folder), open_model(folder, "half")
    for model in (theirs, ours):
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_shared
    oracle.assert_same_steps(oracle.greedy(ours), oracle.greedy(theirs))
    planned = read_spec(folder, configure(context_tokens=oracle.CONTEXT)).weights_bytes
    taken = sum({each.data_ptr(): each.nbytes for each in [*ours.parameters(), *ours.buffers()]}.values())
    assert 0 <= planned - taken < theirs.lm_head.weight.nbytes, "forgotten, or counted twice"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_they_are_compared_as_they_are_loaded(dtype: str, tmp_path: Path, open_model: Open) -> None:
    folder = changed(tmp_path, lost_in_rounding, dtype=torch.float32)
    theirs, ours = oracle.reference(folder, getattr(torch, dtype)), open_model(folder, "half", dtype=dtype)
    for model in (theirs, ours):
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (dtype == "bfloat16")
    oracle.assert_same_steps(oracle.greedy(ours), oracle.greedy(theirs))


def test_an_untied_model_without_an_output_matrix_is_refused(tmp_path: Path, open_model: Open) -> None:
    """The library would make one up."""
    folder = changed(tmp_path, lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"lacks 1 weights.* beginning with 'lm_head\.weight'"):
        open_model(folder, "half")


@pytest.mark.parametrize("where", ["both", "text_config", "outside"])
@pytest.mark.parametrize("what", ["another output matrix", "the embedding alone"])
def test_tied_in_one_of_two_configurations(what: str, where: str, tmp_path: Path, open_model: Open) -> None:
    """Of a model for images and text: what counts is what the library's model says of itself."""
    folder = composite(tmp_path, where != "text_config", where != "outside")
    tensors = load_file(folder / "model.safetensors")
    embedding = next(key for key in tensors if key.endswith("embed_tokens.weight"))
    tensors.pop(OUTPUT, None)
    if what == "another output matrix":
        tensors[OUTPUT] = tensors[embedding].flip(0).clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = composite_reference(folder)
    is_made_up = what == "the embedding alone" and theirs.lm_head.weight is not theirs.get_input_embeddings().weight
    if is_made_up:
        with pytest.raises(CheckpointError, match="lacks 1 weights"):
            open_model(folder, "half")
        return
    ours = open_model(folder, "half")
    oracle.assert_same_steps(oracle.greedy(ours), oracle.greedy(theirs))


def composite(folder: Path, is_tied: bool, is_text_tied: bool) -> Path:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {
        **zoo._COMMON, **zoo._EXPERTS, "head_dim": 16, "tie_word_embeddings": is_text_tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0]}
    config = AutoConfig.for_model(
        "qwen3_vl_moe", text_config=text, vision_config=vision, tie_word_embeddings=is_tied,
        image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    zoo.fill(model, torch.bfloat16)
    model.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    said["tie_word_embeddings"], said["text_config"]["tie_word_embeddings"] = is_tied, is_text_tied
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def composite_reference(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForImageTextToText

    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(folder, experts_implementation="eager")
    return model.eval()


def test_a_quantised_output_matrix_of_its_own(tmp_path: Path, open_model: Open) -> None:
    """As GPTQ writes it with `lm_head`: its codes are not the embedding's numbers."""
    said = {**released_toy.GPTQ, "lm_head": True}
    theirs = released_toy.save(tmp_path, said, dtype=torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    codes, numbers = released_toy.quantised(tensors.pop(OUTPUT), said, "lm_head")
    theirs.lm_head.weight.data.copy_(numbers)
    released_toy.write(
        tmp_path,
        {**tensors, **codes},
        {**theirs.config.to_dict(), "quantization_config": said, "tie_word_embeddings": True},
    )
    assert_near(steps(open_model(tmp_path, "half", dtype="float32"), oracle.PROMPT), steps(theirs, oracle.PROMPT), 1e-5)


def test_a_gguf_file_with_an_output_matrix_equal_to_the_embedding(tmp_path: Path, open_model: Open) -> None:
    model = zoo.make("qwen3_moe", dtype=torch.bfloat16)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    path = gguf_toy.write(tmp_path / "toy.gguf", model)
    assert "output.weight" in checkpoint_at(path).tensors()
    oracle.assert_same_steps(oracle.greedy(open_model(path, "half")), oracle.greedy(model))
