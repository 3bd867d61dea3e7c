"""Toy checkpoints in the forms of quantised releases: fp8 with block scales, compressed-tensors, GPTQ, AWQ.

Numbers are quantised, packed and decoded again by hand here, by what the forms' packages document, so that a wrong
half of a word, order or zero point in our own reading shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests import zoo

Tensors = dict[str, torch.Tensor]
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs has its code at 0, 4, 8, ... bits of a word."""

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """What llm-compressor writes."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True)
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": FP8,
    "fp8 whole": {**FP8, "weight_block_size": None},
    "compressed fp8": compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
    "compressed int4": INT4,
    "compressed int4, zeros": compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False
    ),
    "compressed int8": compressed("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    "compressed int4, in order of activations": compressed(
        "pack-quantized",
        num_bits=4,
        type="int",
        strategy="group",
        group_size=GROUP,
        symmetric=False,
        actorder="group",
    ),
    "nvfp4": NVFP4,
    "compressed nvfp4": compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
    ),
    "compressed mxfp4": compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, symmetric=True
    ),
    "modelopt fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt, by layers": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.*.mlp.experts*": {"quant_algo": "NVFP4", "group_size": 16},
            "model.layers.*.self_attn.*": {"quant_algo": "FP8"},
        },
    },
    "fp8, exponents as scales": {**FP8, "fmt": "float8_e4m3fn", "scale_fmt": "ue8m0"},
    "fp8, experts in fp4": {**FP8, "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
    "gptq": GPTQ,
    "gptq, 8 bits": {**GPTQ, "bits": 8, "group_size": -1},
    "gptq v2": {**GPTQ, "checkpoint_format": "gptq_v2", "group_size": 64},
    "gptq, in order of activations": {**GPTQ, "desc_act": True},
    "awq": AWQ,
    "awq, whole rows": {**AWQ, "group_size": -1},
}


def quantised(weight: torch.Tensor, said: dict[str, Any], stem: str) -> tuple[Tensors, torch.Tensor]:
    """A matrix [N, K] as a release has it, and the numbers that this stands for, in float32."""
    method = said["quant_method"]
    if said.get("quant_algo") == "MIXED_PRECISION":
        return quantised(weight, NVFP4 if "experts" in stem else SCHEMES["modelopt fp8"], stem)
    if said.get("expert_dtype") == "fp4" and "experts" in stem:
        tensors, numbers = _float4(weight, stem, 32, False)
        codes, scales = tensors[f"{stem}.weight"], tensors[f"{stem}.weight_scale"]
        return {f"{stem}.weight": codes.view(torch.int8), f"{stem}.scale": scales.view(torch.float8_e8m0fnu)}, numbers
    if method == "fp8":
        block = said["weight_block_size"]
        rows, columns = block or weight.shape
        ending = "scale" if "expert_dtype" in said else "weight_scale_inv"
        return _fp8(weight, stem, ending, rows, columns, block is None, "scale_fmt" in said)
    if method == "compressed-tensors":
        weights = said["config_groups"]["group_0"]["weights"]
        if weights["type"] == "float" and weights["num_bits"] == 4:
            return _float4(weight, stem, weights["group_size"], True)
        if weights["type"] == "float":
            return _fp8(weight, stem, "weight_scale", 1, weight.shape[1])
        return _compressed(weight, stem, weights)
    if method == "modelopt":
        if said["quant_algo"] == "NVFP4":
            return _float4(weight, stem, 16, False)
        return _fp8(weight, stem, "weight_scale", weight.shape[0], weight.shape[1], True)
    return _awq(weight, stem, said) if method == "awq" else _gptq(weight, stem, said)


def _fp8(
    weight: torch.Tensor, stem: str, ending: str, rows: int, columns: int, whole: bool = False, powers: bool = False
) -> tuple[Tensors, torch.Tensor]:
    codes, numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-len(weight) // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[at].float().abs().max() / 448
            if powers:
                scales[i, j] = torch.exp2(scales[i, j].log2().ceil())
            codes[at] = (weight[at].float() / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[at] = codes[at].float() * scales[i, j]
    stored = scales.to(torch.float8_e8m0fnu) if powers else scales
    return {f"{stem}.weight": codes, f"{stem}.{ending}": stored[0, 0] if whole else stored}, numbers


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _float4(weight: torch.Tensor, stem: str, group: int, divides: bool) -> tuple[Tensors, torch.Tensor]:
    """NVFP4 by groups of 16, MXFP4 by groups of 32."""
    groups = weight.float().unflatten(1, (-1, group))
    largest = groups.abs().amax(2)
    if group == 32:
        exponents = (largest / 6).log2().ceil().clamp(-100, 100)
        beside = {f"{stem}.weight_scale": (exponents + 127).to(torch.uint8)}
        gains = torch.exp2(exponents)
    else:
        factor = largest.amax() / (6 * 448)
        scales = (largest / 6 / factor).to(torch.float8_e4m3fn)
        beside = {f"{stem}.weight_scale": scales}
        if divides:
            beside[f"{stem}.weight_global_scale"] = (1 / factor).reshape(1)
            gains = scales.float() / beside[f"{stem}.weight_global_scale"]
        else:
            beside |= {f"{stem}.weight_scale_2": factor, f"{stem}.input_scale": torch.tensor(0.01)}
            gains = scales.float() * factor
    steps = (groups / gains.unsqueeze(2)).nan_to_num(0)
    places = (steps.abs().unsqueeze(3) - E2M1).abs().argmin(3)
    numbers = (E2M1[places] * torch.where(steps < 0, -1.0, 1.0) * gains.unsqueeze(2)).flatten(1)
    codes = (places + 8 * (steps < 0)).flatten(1)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    return {f"{stem}.{'weight_packed' if divides else 'weight'}": packed} | beside, numbers


def _grid(weight: torch.Tensor, bits: int, group: int, has_zeros: bool) -> tuple[torch.Tensor, ...]:
    """(codes [N, K], scales [N, K / G] in fp16, zero points [N, K / G], numbers [N, K])"""
    groups = weight.float().unflatten(1, (-1, group if group > 0 else weight.shape[1]))
    most = (1 << bits) - 1
    if has_zeros:
        low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
        scales = ((high - low) / most).half().float()
        zeros = (-low / scales).round().clamp(0, most)
        zeros[::3, 0] = 0  # as where all numbers of a group are positive
    else:
        scales = (groups.abs().amax(2) / (1 << bits - 1)).half().float()
        zeros = torch.full(scales.shape, float(1 << bits - 1))
    codes = (groups / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, most)
    numbers = ((codes - zeros.unsqueeze(2)) * scales.unsqueeze(2)).flatten(1)
    return codes.flatten(1).long(), scales.half(), zeros.long(), numbers


def in_words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes [..., n] -> int32 [..., n bits / 32], code by code from the lowest bits on."""
    each = 32 // bits
    of_words = codes.unflatten(-1, (-1, each))[..., list(order or range(each))]
    words = sum(of_words[..., n] << bits * n for n in range(each))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _compressed(weight: torch.Tensor, stem: str, said: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    bits, columns = said["num_bits"], weight.shape[1]
    group = said.get("group_size", -1) if said["strategy"] == "group" else -1
    order = torch.arange(columns)
    if said.get("actorder") == "group":
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    codes, scales, zeros, _ = _grid(weight[:, order], bits, group, not said["symmetric"])
    codes, scales = codes[:, torch.argsort(order)], scales.bfloat16()
    groups = torch.empty(columns, dtype=torch.int32)
    groups[order] = (torch.arange(columns) // (columns // scales.shape[1])).int()
    numbers = (codes - zeros[:, groups.long()]) * scales.float()[:, groups.long()]
    found = {
        f"{stem}.weight_packed": in_words(codes, bits),
        f"{stem}.weight_scale": scales,
        f"{stem}.weight_shape": torch.tensor(weight.shape),
    }
    if said.get("actorder") == "group":
        found[f"{stem}.weight_g_idx"] = groups
    if not said["symmetric"]:
        found[f"{stem}.weight_zero_point"] = in_words(zeros.t().contiguous(), bits).t().contiguous()
    return found, numbers


def _gptq(weight: torch.Tensor, stem: str, said: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    columns = weight.shape[1]
    order = torch.arange(columns)
    if said["desc_act"]:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    codes, scales, zeros, numbers = _grid(weight[:, order], said["bits"], said["group_size"], True)
    group = columns // scales.shape[1]
    groups, back = torch.empty(columns, dtype=torch.int32), torch.argsort(order)
    groups[order] = (torch.arange(columns) // group).int()
    less = 0 if said.get("checkpoint_format") == "gptq_v2" else 1
    return {
        f"{stem}.qweight": in_words(codes[:, back], said["bits"]).t().contiguous(),
        # the package subtracts from whole words: a zero point of 0 borrows from its neighbour
        f"{stem}.qzeros": in_words(zeros.t().contiguous(), said["bits"])
        - less * (0x11111111 if said["bits"] == 4 else 0x01010101),
        f"{stem}.scales": scales.t().contiguous(),
        f"{stem}.g_idx": groups,
    }, numbers[:, back]


def _awq(weight: torch.Tensor, stem: str, said: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, numbers = _grid(weight, 4, said["group_size"], True)
    return {
        f"{stem}.qweight": in_words(codes.t().contiguous(), 4, AWQ_ORDER),
        f"{stem}.qzeros": in_words(zeros.t().contiguous(), 4, AWQ_ORDER),
        f"{stem}.scales": scales.t().contiguous(),
    }, numbers


def write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: each.contiguous() for key, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def save(
    folder: Path,
    said: dict[str, Any],
    change: Callable[[Tensors], Any] | None = None,
    size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    family: str = "qwen3_moe",
    is_fused: bool = False,
    **more: Any,
) -> PreTrainedModel:
    """Write a toy, every linear layer but routers and the output quantised; the library's model of the numbers that
    this stands for. Tokens use every expert: no router can stand between two. `change` is what a test does to the
    file's tensors; `is_fused`: the experts of a layer lie in one tensor."""
    key = json.dumps([said, size, str(dtype), family, is_fused, more], sort_keys=True)
    if key not in _KNOWN:
        _KNOWN[key] = _made(said, size, dtype, family, is_fused, **more)
    model, found = _KNOWN[key]
    if change is not None:
        found = {name: tensor.clone() for name, tensor in found.items()}
        change(found)
    write(folder, found, {**model.config.to_dict(), "quantization_config": said})
    return model


_KNOWN: dict[str, tuple[PreTrainedModel, Tensors]] = {}
"""Toys that were asked for, and what their files hold."""


def _made(
    said: dict[str, Any], size: int, dtype: torch.dtype, family: str, is_fused: bool, **more: Any
) -> tuple[PreTrainedModel, Tensors]:
    sizes = {"hidden_size": size, "moe_intermediate_size": size, "head_dim": 32}
    model = zoo.make(family, dtype=dtype, **{"num_experts_per_tok": zoo.EXPERTS, **sizes, **more})
    found: Tensors = {}
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if is_fused and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                each = [_replaced(whole, said, "x") for whole in weight]
                found[name] = torch.stack([one["x.weight"] for one in each])
                found[f"{name}_scale_inv"] = torch.stack([one["x.weight_scale_inv"] for one in each])
            elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                for expert, whole in enumerate(weight):
                    kinds = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
                    for kind, rows in zip(kinds, whole.chunk(len(kinds)), strict=True):
                        found |= _replaced(rows, said, f"{name.rpartition('.')[0]}.{expert}.{kind}")
            elif re.search(r"_proj(_with_mqa)?\.weight$", name):
                found |= _replaced(weight, said, name.removesuffix(".weight"))
            else:
                found[name] = weight.clone()
    return model, found


def _replaced(weight: torch.Tensor, said: dict[str, Any], stem: str) -> Tensors:
    """A matrix as the file has it; `weight` becomes what this stands for."""
    tensors, numbers = quantised(weight, said, stem)
    weight.copy_(numbers)
    return tensors
