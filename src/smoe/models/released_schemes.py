"""Finds a checkpoint's quantization settings, and reads from them how it stores its matrices: fp8, compressed-tensors,
NVIDIA's modelopt, GPTQ or AWQ.

    quant_method          elements per scale                       layout in the file
    fp8                   128 columns of 128 rows                  row by row
      expert_dtype: fp4   experts: MXFP4, 32 columns               row by row
    compressed-tensors    32 k columns, a row, or a block; NVFP4   row by row
    modelopt              NVFP4: 16 columns; fp8: the matrix       row by row; the two may differ by layer
    gptq, awq             32 k columns, or a whole row             column by column, transposed while loading

The settings are in config.json, in a nested text configuration (Kimi K2.5), or in a file of modelopt:

    config.json            {"quantization_config": {"quant_method": "fp8", ...}}
    config.json            {"text_config": {"quantization_config": ...}}
    hf_quant_config.json   {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", ...}}

For other quantized checkpoints an error with the reason is raised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.formats.base import Format
from smoe.formats.mxfp4 import MXFP4_PAIRS
from smoe.formats.released import FP8, NVFP4, NVFP4_GROUP, WEIGHTS
from smoe.memory.checkpoint_json import read_object
from smoe.models.hub import MODELOPT_FILE
from smoe.models.module_names import in_decoder, is_named

_KEYS = ("quantization_config", "compression_config")
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Names of the language model's configuration within that of a multimodal model."""


class Stated(NamedTuple):
    """The quantization settings of a checkpoint."""

    fields: Mapping[str, Any]
    place: Path
    """The file that contains the settings."""
    is_of_text: bool = False
    """Whether the settings apply to the language model only, so that an image encoder is unquantized."""

    @property
    def method(self) -> object:
        return self.fields.get("quant_method")


def stated_quantisation(config_place: Path) -> Stated | None:
    """Return the quantization settings in a config.json and the files next to it, or None if nothing is quantized."""
    found = stated_in(read_object(config_place), config_place)
    sidecar = _of_modelopt(config_place.with_name(MODELOPT_FILE))
    if sidecar is not None and (found is None or found.method == "modelopt"):
        fields = sidecar.fields if found is None else {**sidecar.fields, **found.fields}
        found = (found or sidecar)._replace(fields=fields)
    return None if found is None or _states_nothing(found.fields) else found


def stated_in(config: Mapping[str, Any], place: Path) -> Stated | None:
    """Return the quantization settings in a configuration itself, or None if there are none."""
    texts = [config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), dict)]
    for each_config in (config, *texts):
        fields = next(
            (each_config[key] for key in _KEYS if isinstance(each_config.get(key), dict) and each_config[key]), None
        )
        if fields is not None:
            experts = next(
                (each["expert_dtype"] for each in (fields, each_config, config) if each.get("expert_dtype")), None
            )
            more = {} if experts is None else {"expert_dtype": experts}
            return Stated({**fields, **more}, place, each_config is not config)
    return None


def _of_modelopt(place: Path) -> Stated | None:
    if not place.exists():
        return None
    fields = read_object(place).get("quantization")
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"the field 'quantization' of {place} is {fields!r:.80}; it must be an object: download the file again"
        )
    return Stated({"quant_method": "modelopt", **fields}, place)


def _states_nothing(fields: Mapping[str, Any]) -> bool:
    """Return whether modelopt's settings leave all weights unquantized; they may quantize only the KV cache."""
    return fields.get("quant_method") == "modelopt" and "quant_algo" in fields and fields["quant_algo"] is None


_GROUPS = (128, 64, 32)
_E4M3 = ("e4m3", "e4m3fn", "float8_e4m3fn", "float8_e4m3")
"""The spellings of E4M3, the only supported 8-bit float format."""
_FLOAT4 = {"nvfp4-pack-quantized": NVFP4_GROUP, "mxfp4-pack-quantized": MXFP4_PAIRS.numbers}
"""{4-bit float format of compressed-tensors: the number of columns for each scale}."""
_NVFP4 = ("NVFP4", "W4A16_NVFP4")
"""modelopt's names of weights in NVFP4, with quantized activations and without. Both store weights in the same way."""
TAKE = "take another release of the model: unquantised, in one of the forms that docs/formats.md lists, or a GGUF file"


@dataclass(frozen=True)
class Scheme:
    """The quantization scheme in a config.json."""

    method: str
    """The quantization method, one of `METHODS`."""
    bits: int = 8
    is_float: bool = False
    """Whether codes are floats: E4M3 with eight bits, E2M1 with four."""
    columns_each: int | None = None
    """The number of columns that have a scale in common; None: a whole row."""
    rows_each: int = 1
    """The number of rows that have a scale in common; 0: all rows."""
    has_zeros: bool = False
    """Whether zero points are stored."""
    less: int = 0
    """A number that is added to stored zero points."""
    is_reordered: bool = False
    """Whether the columns of a group are not adjacent (GPTQ's act-order). Such matrices must be packed before use."""
    left_out: tuple[str, ...] = ()
    """Linear layers that `config.json` lists as unquantized. Entries are names, suffixes or parts of names, patterns
    (`*`), or `re:` and a regular expression."""
    is_of_text: bool = False
    """Whether only the language model is quantized."""
    experts: Scheme | None = None
    """The scheme of routed experts if it differs from that of other layers."""
    layers: Mapping[str, Scheme] = field(default_factory=dict)
    """{layer name from the layer number on: its scheme}, if schemes differ by layer. Other layers are unquantized."""

    @property
    def is_float4(self) -> bool:
        """Whether the format is NVFP4 (groups of 16) or MXFP4 (groups of 32)."""
        return self.is_float and self.bits == 4

    def form(self, columns: int) -> Format | None:
        """Return the quantized format in which a matrix with this number of columns is stored in slots, or None if its
        rows do not consist of whole blocks."""
        if self.is_float4:
            forms = NVFP4.values() if self.columns_each == NVFP4_GROUP else (MXFP4_PAIRS,)
            return next((form for form in forms if form.fits(columns)), None)
        if self.is_float:
            each = self.columns_each or columns
            return FP8 if columns % FP8.numbers == 0 and each % FP8.numbers == 0 else None
        each = self.columns_each or columns
        numbers = next((group for group in _GROUPS if each % group == 0), None)
        return None if numbers is None or columns % each else WEIGHTS[self.bits, numbers]

    def file_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix in the files: codes, scales, and if present zero points or the order of
        columns."""
        groups = columns // (self.columns_each or columns)
        scales = -(-rows // (self.rows_each or rows)) * groups
        codes = rows * columns * self.bits // 8
        if self.is_float:
            return codes + scales * (1 if self.is_float4 else 4 if self.method == "fp8" else 2)
        order = 4 * columns if self.method == "gptq" or self.is_reordered else 0
        return codes + scales * 2 + (scales * self.bits // 8 if self.has_zeros else 0) + order

    def leaves_out(self, module: str) -> bool:
        """Return whether `config.json` lists a linear layer as unquantized; the files may differ."""
        return is_named(self.left_out, module)

    def of(self, module: str) -> Scheme | None:
        """Return the scheme of a non-expert linear layer, or None if it is unquantized."""
        if self.layers:
            name = in_decoder(module)
            patterns = (pattern for pattern in self.layers if "*" in pattern and fnmatch(name, pattern))
            return self.layers.get(name) or next((self.layers[pattern] for pattern in patterns), None)
        return None if self.leaves_out(module) or (self.is_of_text and not in_decoder(module)) else self

    def of_experts(self, module: str) -> Scheme | None:
        """Return the scheme of a module's routed experts, or None if they are unquantized."""
        names = (module, f"{module}.0.down_proj", f"{module}.0.w2", f"{module}.down_proj")
        if self.layers:
            return next((found for found in map(self.of, names) if found is not None), None)
        return None if any(map(self.leaves_out, names)) else self.experts or self


def read_scheme(stated: Stated | None) -> Scheme | None:
    """Return the scheme in a checkpoint's settings, or None if it is none of `METHODS`. Raise `UnsupportedModelError`,
    with the reason, for schemes that smoe does not read."""
    if stated is None or not isinstance(stated.method, str) or stated.method not in METHODS:
        return None
    scheme = METHODS[stated.method](stated.fields, stated)
    return replace(scheme, left_out=_left_out(stated.fields), is_of_text=stated.is_of_text)


def scheme_of(config: Mapping[str, Any], place: Path) -> Scheme | None:
    """Return the quantization scheme in a configuration, as `read_scheme` does."""
    return read_scheme(stated_in(config, place))


def _left_out(entries: Mapping[str, Any]) -> tuple[str, ...]:
    lists = [entries.get(key) for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")]
    found = [each for names in lists if isinstance(names, list) for each in names if isinstance(each, str)]
    rules = entries.get("dynamic")  # GPTQ: rules for other settings, by regular expressions
    found += [f"re:{rule[2:]}" for rule in rules if rule.startswith("-:")] if isinstance(rules, dict) else []
    return (*found, *([] if entries.get("lm_head") else ["lm_head"]))


def _refuse(stated: Stated, property: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{stated.place}: the experts quantised by {stated.method} {property}, which smoe does not read; {TAKE}"
    )


def _fp8(entries: Mapping[str, Any], stated: Stated) -> Scheme:
    size, experts = entries.get("weight_block_size"), entries.get("expert_dtype", "fp8")
    if entries.get("fmt", "e4m3") not in _E4M3:
        _refuse(stated, f"are in the format {entries['fmt']!r:.40}")
    if experts not in ("fp8", "fp4"):
        _refuse(stated, f"have the expert_dtype {experts!r:.40}")
    if entries.get("moe_quant_algo") is not None or entries.get("quantized_layers"):
        _refuse(stated, f"are quantised once more by modelopt (moe_quant_algo {entries.get('moe_quant_algo')!r:.40})")
    fp4 = Scheme("fp8", 4, True, MXFP4_PAIRS.numbers) if experts == "fp4" else None
    if size is None:
        return Scheme("fp8", is_float=True, rows_each=0, experts=fp4)
    if not (isinstance(size, (list, tuple)) and len(size) == 2 and size[1] == FP8.numbers and _is_count(size[0])):
        _refuse(stated, f"have blocks of {size!r:.40} instead of [128, 128]")
    return Scheme("fp8", is_float=True, columns_each=FP8.numbers, rows_each=int(size[0]), experts=fp4)


def _compressed(entries: Mapping[str, Any], stated: Stated) -> Scheme:
    groups = entries.get("config_groups")
    kinds = [each.get("weights") for each in groups.values()] if _holds_objects(groups) else []
    weights: Any = kinds[0] if kinds else None
    if not isinstance(weights, dict) or any(kind != weights for kind in kinds):
        _refuse(stated, f"have {len(kinds) or 'no'} kinds of weights in 'config_groups'")
    form = entries.get("format")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if form in _FLOAT4:
        if weights.get("group_size") != _FLOAT4[form]:
            _refuse(stated, f"have groups of {weights.get('group_size')!r:.40} columns in the format {form!r}")
        return Scheme("compressed-tensors", 4, True, _FLOAT4[form])
    columns_each, rows_each = _shared(weights, strategy, stated)
    if kind == "float" and bits == 8:
        return Scheme("compressed-tensors", 8, True, columns_each, rows_each)
    if kind != "int" or bits not in (4, 8) or form != "pack-quantized":
        _refuse(stated, f"are {kind} with {bits} bits in the format {form!r:.40}")
    if strategy not in ("group", "channel"):
        _refuse(stated, f"have scales by {strategy!r:.40}")
    is_reordered = weights.get("actorder") not in (None, False, "static", "weight")
    return Scheme(
        "compressed-tensors",
        bits,
        columns_each=columns_each,
        has_zeros=not weights.get("symmetric", True),
        is_reordered=is_reordered,
    )


def _holds_objects(groups: object) -> TypeGuard[dict[str, dict[str, Any]]]:
    return isinstance(groups, dict) and all(isinstance(each, dict) for each in groups.values())


def _shared(weights: Mapping[str, Any], strategy: object, stated: Stated) -> tuple[int | None, int]:
    """Return (columns, rows): how many columns and rows of a matrix have a scale in common, as in `Scheme`."""
    if strategy == "tensor":
        return None, 0
    if strategy == "channel":
        return None, 1
    size, block = weights.get("group_size"), weights.get("block_structure")
    if strategy == "group" and _is_count(size):
        return size, 1
    if strategy == "block" and isinstance(block, (list, tuple)) and len(block) == 2 and all(map(_is_count, block)):
        return int(block[1]), int(block[0])
    _refuse(stated, f"have scales by {strategy!r:.40} of {size if strategy == 'group' else block!r:.40}")


def _modelopt(entries: Mapping[str, Any], stated: Stated) -> Scheme:
    algorithm = str(entries.get("quant_algo")).upper()
    if algorithm == "MIXED_PRECISION":
        return Scheme("modelopt", is_float=True, layers=_layers(entries, stated))
    if algorithm == "FP8":
        return Scheme("modelopt", is_float=True, rows_each=0)
    if algorithm not in _NVFP4:
        _refuse(stated, f"are quantised as {entries.get('quant_algo')!r:.40}")
    if entries.get("group_size", NVFP4_GROUP) != NVFP4_GROUP:
        _refuse(stated, f"have groups of {entries['group_size']!r:.40} columns in NVFP4")
    return Scheme("modelopt", 4, True, NVFP4_GROUP)


def _layers(entries: Mapping[str, Any], stated: Stated) -> dict[str, Scheme]:
    """Return the scheme of each quantized layer of the decoder."""
    layers = entries.get("quantized_layers")
    if not _holds_objects(layers) or not layers:
        _refuse(stated, "are quantised as 'MIXED_PRECISION' without 'quantized_layers', which names the layers,")
    read = {json.dumps(each, sort_keys=True): each for each in layers.values()}
    schemes = {key: _modelopt(each, stated) for key, each in read.items() if each.get("quant_algo") is not None}
    found = {in_decoder(name): schemes.get(json.dumps(each, sort_keys=True)) for name, each in layers.items()}
    return {name: scheme for name, scheme in found.items() if name and scheme is not None}


def _gptq(entries: Mapping[str, Any], stated: Stated) -> Scheme:
    bits, group = entries.get("bits"), entries.get("group_size")
    if bits not in (4, 8):
        _refuse(stated, f"have {bits!r:.40} bits")
    if entries.get("is_marlin_format") or entries.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        _refuse(stated, f"are in the format {entries.get('checkpoint_format', 'marlin')!r:.40}")
    return Scheme(
        "gptq",
        bits,
        columns_each=_group(group, stated),
        has_zeros=True,
        less=0 if entries.get("checkpoint_format") == "gptq_v2" else 1,
        is_reordered=bool(entries.get("desc_act")),
    )


def _awq(entries: Mapping[str, Any], stated: Stated) -> Scheme:
    bits, version = entries.get("bits", entries.get("w_bit")), str(entries.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        _refuse(stated, f"have {bits!r:.40} bits in the version {version!r:.40}")
    return Scheme(
        "awq",
        4,
        columns_each=_group(entries.get("group_size", entries.get("q_group_size")), stated),
        has_zeros=bool(entries.get("zero_point", True)),
    )


def _group(size: object, stated: Stated) -> int | None:
    if size == -1:
        return None
    if not _is_count(size):
        _refuse(stated, f"have groups of {size!r:.40} columns")
    return size  # type: ignore[return-value]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


METHODS: dict[str, Callable[[Mapping[str, Any], Stated], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
}
"""{quantization method: the function that reads its scheme from the settings}."""
