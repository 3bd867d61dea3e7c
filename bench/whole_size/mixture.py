"""The type that llama.cpp's quantizer gives each tensor of a file, by the tensor's name and the model's sizes.

The rules are those of its release of October 2026 for models with more than eight experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.whole_size.geometry import Geometry
from bench.whole_size.tensors import Tensor
from smoe.formats.registry import GGML

_FULL = "F32"
_DEFAULT = {"Q4_K_M": "Q4_K", "Q2_K": "Q2_K", "MXFP4_MOE": "Q8_0"}
"""The type of matrices without a rule of their own, by mixture."""
_FEW_COLUMNS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""The type to use instead of another one, if rows are not a multiple of its blocks."""
_NOT_QUANTISED = re.compile(r".*_norm\.weight|.*ffn_gate_inp\.weight|.*ssm_conv1d\.weight|.*(?<!\.weight)")
_VALUES = re.compile(r".*\.(attn_v|attn_qkv|attn_kv_b)\.weight")
_DOWN = re.compile(r"blk\.(?P<layer>\d+)\.ffn_down.*")


def types_of(g: Geometry, tensors: Sequence[Tensor]) -> dict[str, str]:
    """Return the type of every tensor by its name. `tensors` are in the order of layers."""
    values = [tensor.name for tensor in tensors if _VALUES.fullmatch(tensor.name)]
    found = {}
    for tensor in tensors:
        if len(tensor.shape) < 2 or _NOT_QUANTISED.fullmatch(tensor.name):
            found[tensor.name] = _FULL
            continue
        kind = _type_of_matrix(g, tensor, values)
        while not GGML[kind].fits(tensor.shape[-1]):
            kind = _FEW_COLUMNS[kind]
        found[tensor.name] = kind
    return found


def _type_of_matrix(g: Geometry, tensor: Tensor, values: Sequence[str]) -> str:
    """Return the type of a matrix, whatever the length of its rows."""
    if g.mixture == "MXFP4_MOE":
        return "MXFP4" if len(tensor.shape) > 2 else "Q8_0"
    if tensor.name == "output.weight":
        return "Q6_K"
    if tensor.name in values:
        return _type_of_values(g, values.index(tensor.name), len(values))
    down = _DOWN.fullmatch(tensor.name)
    if down is not None:
        is_raised = g.mixture == "Q4_K_M" and _has_more_bits(int(down["layer"]), g.layers)
        return "Q6_K" if is_raised else {"Q4_K_M": "Q4_K", "Q2_K": "Q3_K"}[g.mixture]
    if g.mixture == "Q2_K" and tensor.name.endswith("attn_output.weight"):
        return "Q3_K"
    return _DEFAULT[g.mixture]


def _type_of_values(g: Geometry, number: int, count: int) -> str:
    """Return the type of the `number`-th of `count` matrices that compute values."""
    if g.mixture == "Q2_K":
        return "Q4_K" if g.heads >= 4 * g.key_value_heads else "Q3_K"
    return "Q6_K" if _has_more_bits(number, count) else "Q4_K"


def _has_more_bits(number: int, count: int) -> bool:
    """Return whether a layer is among the first eighth, the last eighth, or every third of the others."""
    return number < count // 8 or number >= 7 * count // 8 or (number - count // 8) % 3 == 2
