"""Which models take images, and what is said of the others.

Would catch: an image encoder that is loaded unasked, or left out of the budget, and a refusal without a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError, UnsupportedModelError
from smoe.models.image_encoder import ImageEncoder
from smoe.models.image_families import IMAGE_FAMILIES
from smoe.models.read_spec import read_spec
from smoe.presets import configure
from tests import gguf_toy, image_toys, oracle

WITH = configure(images=True, context_tokens=64)


def test_every_family_has_a_toy() -> None:
    assert set(IMAGE_FAMILIES) == set(image_toys.FAMILIES)


@pytest.mark.parametrize("family", image_toys.FAMILIES)
def test_the_encoder_is_in_the_budget(family: str, tmp_path: Path) -> None:
    image_toys.config_of(family).save_pretrained(tmp_path)
    spec, without = (read_spec(tmp_path, configure(images=images, context_tokens=64)) for images in (True, False))
    demand, plain = spec.demand(WITH), without.demand(configure(context_tokens=64))
    parts = [spec.shell.get_submodule(path) for path in IMAGE_FAMILIES[family].encoder]
    tensors = [each for part in parts for each in (*part.parameters(), *part.buffers())]
    nbytes = sum(each.numel() * _item_bytes(each, spec.dtype.itemsize) for each in tensors)
    assert demand.image_encoder_bytes == nbytes > 0 == plain.image_encoder_bytes
    assert demand.image_step_bytes > 0 == plain.image_step_bytes
    larger = spec.demand(configure(images=True, image_tokens=2048, context_tokens=64))
    assert larger.image_step_bytes > demand.image_step_bytes


def _item_bytes(tensor: torch.Tensor, of_weights: int) -> int:
    """Weights have the model's dtype, and buffers their own, or float32 if that is wider."""
    return of_weights if isinstance(tensor, torch.nn.Parameter) else max(4, tensor.element_size())


def test_models_without_images_are_refused(toy: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"family 'mixtral': smoe computes images for the families gemma4"):
        read_spec(toy("mixtral"), WITH)
    file = gguf_toy.write(tmp_path / "toy.gguf", gguf_toy.make("qwen3_moe"))
    with pytest.raises(UnsupportedModelError, match=r"toy\.gguf is a GGUF file"):
        read_spec(file, WITH)


def test_settings_that_exclude_images() -> None:
    with pytest.raises(ConfigError, match="cannot be combined with `prefetch=draft-model`"):
        configure(images=True, prefetch="draft-model")
    with pytest.raises(ConfigError, match="`image_tokens` has an effect only with `images=true`"):
        configure(image_tokens=100)


def test_without_the_option_there_is_no_encoder(tmp_path: Path, open_model: Callable[..., PreTrainedModel]) -> None:
    folder = image_toys.save("llama4", tmp_path, torch.float32)
    model = open_model(folder, "half")
    assert not hasattr(model, "vision_model")
    with pytest.raises(UnsupportedModelError, match="llama4_text"):
        ImageEncoder(model)
    with_images = open_model(folder, "half", images=True)
    prompt = oracle.PROMPT.clamp(max=110)
    ours, theirs = oracle.greedy(with_images, prompt, 4), oracle.greedy(model, prompt, 4)
    assert torch.equal(ours.tokens, theirs.tokens)
