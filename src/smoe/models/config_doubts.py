"""Remarks, for the output of `smoe plan`, about what a config.json leaves open about the size of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smoe.models.spec import ModelSpec
from smoe.units import format_bytes

_FURTHER_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
"""The names that families give to the number of multi-token prediction layers."""
_NOTED_DIFFERENCE = 0.02
"""The relative difference between the sizes in memory and on disk above which a remark is made."""


def read_as(fields: Mapping[str, Any], family: str) -> str:
    """Return the remark for a family that transformers lacks and that is read as the known family `family`."""
    return (
        f"config.json names the family {fields.get('model_type')!r:.40}, which transformers does not have; read as "
        f"{family!r} by its architecture, without the code in the repository"
    )


def doubts_of(fields: Mapping[str, Any], spec: ModelSpec, is_quantised: bool) -> tuple[str, ...]:
    """Return the remarks about a model whose weight files are not on disk, one for each point that config.json leaves
    open. `fields`: the fields of config.json."""
    found = [_of_further_layers(fields, spec), _of_type(fields, spec), _of_tied(fields, spec)]
    return tuple(doubt for doubt in (*found, _of_lists(spec) if is_quantised else None) if doubt is not None)


def _texts(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a configuration and all configurations that are nested in it."""
    return [fields, *(value for value in fields.values() if isinstance(value, dict))]


def _of_further_layers(fields: Mapping[str, Any], spec: ModelSpec) -> str | None:
    counts = [each[name] for each in _texts(fields) for name in _FURTHER_LAYERS if isinstance(each.get(name), int)]
    layers = max(counts, default=0)
    if layers < 1 or spec.files is None or spec.files.experts is None:
        return None
    all_layers = int(spec.config.get_text_config().num_hidden_layers)
    others = (spec.files.together - spec.files.experts) // max(1, all_layers)
    each = spec.files.experts // len(spec.sites) + others
    return (
        f"config.json names {layers} layer{'s' * (layers > 1)} of multi-token prediction, which are neither read nor "
        f"counted: the files may be larger by about {format_bytes(layers * each)}"
    )


def _of_type(fields: Mapping[str, Any], spec: ModelSpec) -> str | None:
    if any(each.get(name) for each in _texts(fields) for name in ("dtype", "torch_dtype")):
        return None
    return f"config.json names no dtype: what is not quantised is counted as {spec.own_dtype}"


def _of_tied(fields: Mapping[str, Any], spec: ModelSpec) -> str | None:
    tied = spec.outline.tied
    if not tied or any("tie_word_embeddings" in each for each in _texts(fields)):
        return None
    nbytes = sum(spec.outline.weights[source].numbers for source in tied.values()) * spec.dtype.itemsize
    return (
        "config.json does not say whether the output matrix is the embedding, which is the family's default; where the "
        f"files have one of its own, it takes {format_bytes(nbytes)} more"
    )


def _of_lists(spec: ModelSpec) -> str:
    quantised = sum(tensor.nbytes for tensor in spec.dense.values())
    return (
        f"which non-expert layers are quantised is known from config.json alone ({format_bytes(quantised)} of "
        f"{format_bytes(spec.weights_bytes)}); the files may differ"
    )


def doubts_of_files(spec: ModelSpec) -> list[str]:
    """Return a remark if the experts of a quantized checkpoint have another size in memory than in its files."""
    if spec.files is None or spec.files.experts is None or spec.precision != "auto":
        return []
    more = spec.experts_bytes / spec.files.experts - 1
    if abs(more) <= _NOTED_DIFFERENCE:
        return []
    return [
        f"experts take {format_bytes(spec.experts_bytes)} in memory and about {format_bytes(spec.files.experts)} in "
        f"the files ({more:+.0%}): in memory every block has its scale as a float32; all files together take about "
        f"{format_bytes(spec.files.together)}"
    ]
