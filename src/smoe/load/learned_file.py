"""Learned values: tuned values that contain tensors and are valid for one model's weights only, in the user's cache.

    learned/MODEL-KIND.safetensors      a policy or predictor declares the class of the value that it needs


A file's metadata have one entry, "smoe", with a JSON object: the format version, the checksum of the model's weights,
that of the tensors, and further fields. A file that is incomplete, for other weights, or of another version is refused
with the reason, because using only some values would lose quality without a message.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from smoe.errors import ConfigError, UnpreparedError
from smoe.models.weight_samples import checksum
from smoe.user_cache import of_model
from smoe.whole_file import whole_file

_METADATA = "smoe"

Tensors = Mapping[str, torch.Tensor]
L = TypeVar("L", bound="LearnedValue")


class NotLearnedError(Exception):
    """Raised if no learned values exist for a model's weights. The text is the reason; the caller adds what the user
    should do."""


class ModelShape(NamedTuple):
    """The model that a learned value must fit."""

    experts: Mapping[int, int]
    """The number of experts in each MoE layer, by layer."""
    hidden_size: int = 0
    depth: int = 1
    """The largest number of layers ahead that are predicted."""


class LearnedValue(ABC):
    """The base class of learned values. Subclasses are frozen dataclasses."""

    setting: ClassVar[str] = "prefetch"
    """The setting that names the policy or predictor."""
    kind: ClassVar[str] = ""
    """The part of a file's name that identifies this kind of value. If it is empty, the name of the policy or predictor
    is used."""
    version: ClassVar[int] = 2
    how: ClassVar[str]
    """The command that learns the value of the predictor `{name}`."""
    error: ClassVar[type[ConfigError]] = UnpreparedError
    """The exception that is raised if no value is stored. For `UnpreparedError`, the command line also prints the
    command to run first."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The policy or predictor that needs the value."""

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the value takes, if nothing else counts them."""
        return 0

    @property
    def origin(self) -> str:
        """A text that says where the value comes from, for reports; empty if it is obvious."""
        return ""

    @abstractmethod
    def contents(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the tensors and JSON fields to store."""

    @classmethod
    @abstractmethod
    def of_contents(cls, name: str, tensors: Tensors, fields: dict[str, Any], model: ModelShape) -> LearnedValue:
        """Return the value that a file contains. Raise `NotLearnedError` if it does not fit the model."""

    def store(self, folder: Path) -> Path:
        """Store the value for the model in `folder`, atomically. Return the file's path. Raises `OSError`."""
        return keep_learned(self.kind or self.name, self.version, folder, *self.contents())

    @classmethod
    def read(cls: type[L], name: str, folder: Path, model: ModelShape) -> L:
        """Return the value that was learned for the model in `folder` and the policy or predictor `name`.

        Raises `ConfigError` if the value is missing, damaged, of another format version, or for other weights.
        """
        try:
            tensors, fields = learned(cls.kind or name, cls.version, folder)
            return cast("L", cls.of_contents(name, tensors, fields, model))
        except NotLearnedError as error:
            raise cls.error(
                f"`{cls.setting}={name}`: {error}; run {cls.how.format(name=name)}, once",
                setting=cls.setting,
                given=name,
                allowed="for models for which smoe tune has learned it",
            ) from error


def path_of(kind: str, folder: Path) -> Path:
    """Return the path of the file with learned values of the model in `folder`. `kind` names the type of values."""
    path, plain = of_model("learned", folder), re.sub(r"[^\w-]", "_", kind)  # the name of a plug-in contains a path
    return path.with_name(f"{path.stem}-{plain}.safetensors")


def keep_learned(kind: str, form: int, folder: Path, tensors: Tensors, fields: Mapping[str, Any]) -> Path:
    """Write tensors and JSON fields to a file of learned values, atomically and reproducibly. Return the path. Raises
    `OSError`. `form`: the format version."""
    path = path_of(kind, folder)
    header = {"format": form, "checkpoint": checksum(folder), "tensors": _digest(tensors), **fields}
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(save(whole, {_METADATA: json.dumps(header)}))  # one entry, because the order of several is not fixed
    return path


def learned(kind: str, form: int, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and JSON fields of the learned values for the weights in `folder`. Raise `NotLearnedError` if
    there are none of the format version `form`."""
    path = path_of(kind, folder)
    try:
        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            fields: dict[str, Any] = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except FileNotFoundError as error:
        raise NotLearnedError(f"no tuned values are stored for the model in {folder}") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise NotLearnedError(f"{path} is truncated, damaged or not readable ({error})") from error
    if fields.get("format") != form:
        raise NotLearnedError(f"{path} has format {fields.get('format')}; this version of smoe reads format {form}")
    if fields.get("checkpoint") != checksum(folder):
        raise NotLearnedError(f"{path} was made for other weights than those in {folder}")
    if fields.get("tensors") != _digest(tensors):
        raise NotLearnedError(f"{path} is damaged: its tensors do not match its header")
    return tensors, fields


def _digest(tensors: Tensors) -> str:
    """Return the SHA-256 of the tensors' names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
