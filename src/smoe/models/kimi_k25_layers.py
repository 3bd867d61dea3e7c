"""The parts of Kimi-K2.5 next to its language model, for `families.py`: the vision tower and its projection, which are
loaded too. The language model is of the family `deepseek_v3`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smoe.models.family_parts import Weights, linear, norm
from smoe.models.outline import Buffer, Weight
from smoe.models.plain_config import PlainConfig, UndescribedError

_TOWER, _PROJECTOR = "model.vision_tower", "model.mm_projector"
_USUAL = {
    "patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64, "pos_emb_time": 4, "num_attention_heads": 16,
    "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304,
}  # fmt: skip
"""Every number of the vision tower that determines a size, with its default value in transformers."""
_MERGED = [2, 2]
"""The usual numbers of rows and columns of patches that are merged to one."""


def usual_form(stated: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the language model. The whole configuration says whether the output matrix is the
    embedding."""
    return stated | {"tie_word_embeddings": whole.get("tie_word_embeddings", True)}


def vision(c: PlainConfig) -> Weights:
    of, (hidden, inner) = _numbers(c), (_numbers(c)["hidden_size"], _numbers(c)["intermediate_size"])
    yield f"{_TOWER}.patch_embed.proj.weight", Weight((hidden, 3, of["patch_size"], of["patch_size"]))
    yield f"{_TOWER}.patch_embed.proj.bias", Weight((hidden,))
    places = of["pos_emb_height"], of["pos_emb_width"], hidden
    yield f"{_TOWER}.patch_embed.pos_emb.position_embeddings", Weight(places)
    for number in range(of["num_hidden_layers"]):
        layer = f"{_TOWER}.layers.{number}"
        yield from norm(f"{layer}.norm1", hidden, bias=True)
        yield from norm(f"{layer}.norm2", hidden, bias=True)
        for name in ("proj", "q_proj", "k_proj", "v_proj"):
            yield from linear(f"{layer}.attn.{name}", hidden, hidden, bias=True)
        yield from linear(f"{layer}.mlp.fc1", inner, hidden, bias=True)
        yield from linear(f"{layer}.mlp.fc2", hidden, inner, bias=True)
    yield from norm(f"{_TOWER}.final_layernorm", hidden, bias=True)
    projected, merged = c.whole.get("projection_hidden_size", 1152), _merged(c) * hidden
    yield from norm(f"{_PROJECTOR}.pre_norm", projected, bias=True)
    yield from linear(f"{_PROJECTOR}.in_proj", merged, merged, bias=True)
    yield from linear(f"{_PROJECTOR}.out_proj", c.hidden_size, merged, bias=True)


def buffers(c: PlainConfig) -> Mapping[str, Buffer]:
    of = _numbers(c)
    rotated = (of["hidden_size"] // of["num_attention_heads"] // 2 + 1) // 2
    found = {f"{_TOWER}.rotary_emb.{name}": Buffer((rotated,)) for name in ("inv_freq", "original_inv_freq")}
    times = Buffer((of["pos_emb_time"] + 1, of["hidden_size"]))
    return found | {f"{_TOWER}.patch_embed.pos_emb.time_position_embeddings": times}


def _numbers(c: PlainConfig) -> dict[str, int]:
    stated = c.whole.get("vision_config", {})
    found = {name: stated.get(name, usual) for name, usual in _USUAL.items()} if isinstance(stated, Mapping) else {}
    if not found or not all(type(number) is int and number > 0 for number in found.values()):
        raise UndescribedError(f"vision_config {stated!r:.80}")
    return found


def _merged(c: PlainConfig) -> int:
    kernel = c.whole.get("vision_config", {}).get("merge_kernel_size", _MERGED)
    if not isinstance(kernel, (list, tuple)) or len(kernel) != 2 or not all(type(each) is int for each in kernel):
        raise UndescribedError(f"merge_kernel_size {kernel!r:.80}")
    return int(kernel[0] * kernel[1])
