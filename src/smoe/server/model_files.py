"""What a model's files say about it: format, size, number of parameters, quantization."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gguf import LlamaFileType
from transformers import PretrainedConfig, PreTrainedModel

from smoe.memory.gguf_header import is_gguf
from smoe.memory.gguf_index import read_headers
from smoe.memory.safetensors_index import StoredTensor
from smoe.models.described import described_at
from smoe.models.file_bytes import bytes_of_files


@dataclass(frozen=True)
class ModelFiles:
    """The properties of a model's files."""

    format: str
    """`gguf` or `safetensors`."""
    architecture: str
    """The architecture by the file's own name (`qwen3moe`), or the family by transformers' name."""
    nbytes: int
    """The size of the files with weights."""
    parameters: int
    quantisation: str
    """The quantization by its usual name, such as `Q4_K_M`, `FP8` or `BF16`."""


def files_of(model: PreTrainedModel) -> ModelFiles:
    """Return the properties of the files from which a model was loaded. Only their headers are read."""
    place, parameters = Path(model.config.name_or_path), int(model.num_parameters())
    tensors = described_at(place).tensors().values()
    if is_gguf(place) and not place.is_dir():
        headers = read_headers(place)
        metadata, nbytes = headers[0].metadata, sum(header.identity.nbytes for header in headers)
        quantisation = _file_type(metadata.get("general.file_type")) or _usual_type(tensors)
        return ModelFiles("gguf", str(metadata["general.architecture"]), nbytes, parameters, quantisation)
    nbytes = bytes_of_files({tensor.path for tensor in tensors}).together
    quantisation = _method(model.config) or _usual_type(tensors)
    return ModelFiles("safetensors", str(model.config.model_type), nbytes, parameters, quantisation)


def _file_type(number: object) -> str:
    """Return the name of a GGUF file's `general.file_type`; empty for an unknown one."""
    known = {int(each): each.name for each in LlamaFileType if each is not LlamaFileType.GUESSED}
    return known.get(number, "").removeprefix("MOSTLY_").removeprefix("ALL_") if isinstance(number, int) else ""


def _method(config: PretrainedConfig) -> str:
    """Return the quantization that a configuration names; empty if it names none."""
    stated = getattr(config, "quantization_config", None) or {}
    method = stated.get("quant_method", "") if isinstance(stated, dict) else getattr(stated, "quant_method", "")
    return str(getattr(method, "value", method)).upper()


def _usual_type(tensors: Iterable[StoredTensor]) -> str:
    """Return the data type of most of the bytes."""
    kinds = Counter[str]()
    for tensor in tensors:
        kinds[tensor.dtype] += tensor.nbytes
    return kinds.most_common(1)[0][0] if kinds else ""
