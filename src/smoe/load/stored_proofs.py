"""Stores the results of the proofs that loading makes, so that later loads of the same model need not repeat them.

The results hold as long as everything they depend on is unchanged, so all of it is in the key of the stored results:
the code of smoe, of torch and of the model's classes, the processor and the system, limits and switches of torch's
libraries, the number of threads, the settings, and the identity of each of the model's files. Only complete entries
that no other user can have written are used (`private_cache.py`). Measured times are never stored.

Results are stored only for models on a CPU. With a GPU, an emulated device or a format of another package, every load
makes all proofs.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn

from smoe import compute, fastpath, load, memory, models, policy, private_cache, runtime
from smoe.bounds import ALWAYS
from smoe.config import EngineConfig
from smoe.formats.registry import FORMATS, GGML, OPENAI, OWN
from smoe.formats.released import RELEASED
from smoe.kernels.jit import llvmlite_version
from smoe.kernels.object_cache import digest_of, key_of, processor_lines
from smoe.kernels.verdicts import Verdicts
from smoe.load.resolve import Resolved
from smoe.memory.gguf_header import part_paths

PROOFS = private_cache.PrivateCache("proofs", "results of self-tests", "proofs", b"smoe proofs 1\n", 4 << 20)
"""The entries, one for each model and combination of settings, of some kilobytes."""
_ENVIRONMENT = ("ATEN_", "DNNL_", "GLIBC_", "GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "SMOE_",
                "TORCH")  # fmt: skip
"""The first letters of environment variables that can change how torch or smoe computes."""
_UNRELATED = ("SMOE_API_KEY", "SMOE_DEBUG", "SMOE_LOG")
_NOT_PROVEN = frozenset({"memory_bytes", "resident_share", "host_memory_bytes", "count", "direct_io", "io_threads",
                         "preload", "self_test"})  # fmt: skip
"""Settings on which no proof depends: how much memory is used, and how files are read. All other settings are part of
the key."""
_log = logging.getLogger(__name__)


class StoredProofs(NamedTuple):
    """The results of one load's proofs, and the key under which they are stored."""

    key: bytes | None
    """None if the results must not be stored."""
    verdicts: Verdicts

    def store(self) -> None:
        """Store the results if this load made a proof."""
        if self.key is not None and self.verdicts.made:
            PROOFS.write(self.key, json.dumps(dict(self.verdicts.all)).encode())


def stored_proofs(model: nn.Module, resolved: Resolved) -> StoredProofs:
    """Return the results of earlier loads that hold for this load of `model`, to be completed and stored. There are
    none if the settings require that every load makes all proofs."""
    if not _may_be_stored(resolved):
        return StoredProofs(None, Verdicts())
    key = key_of_proofs(model, resolved)
    if resolved.config.self_test == ALWAYS:
        try:
            PROOFS.forget(key)  # a proof that fails must not leave an older result
        except OSError as error:
            _log.warning("the stored results of self-tests cannot be deleted: %s", error)
        return StoredProofs(key, Verdicts())
    content = PROOFS.read(key)
    return StoredProofs(key, Verdicts(None if content is None else json.loads(content)))


def stored_count() -> int:
    """Return the number of models and combinations of settings for which results are stored."""
    folder = PROOFS.folder
    return sum(path.suffix == f".{PROOFS.suffix}" for path in folder.iterdir()) if folder.is_dir() else 0


def _may_be_stored(resolved: Resolved) -> bool:
    has_added = len(FORMATS) > len(GGML | OWN | OPENAI | RELEASED)  # code of other packages, which no digest covers
    is_cpu = resolved.device.type == "cpu" and resolved.profile is None
    return is_cpu and not has_added and private_cache.is_possible()


def key_of_proofs(model: nn.Module, resolved: Resolved) -> bytes:
    """Return a text of everything on which the results of proofs depend."""
    parts = {
        "code": _code_digest(),
        "system": _system(),
        "libraries": _libraries(),
        "environment": _environment(),
        "switches": switches(),
        "settings": _settings(resolved.config),
        "classes": _identities(_files_of_classes(model)),
        "model": _identities(model_files(resolved)),
    }
    return key_of("proofs", json.dumps(parts, default=str))


@functools.cache
def _code_digest() -> str:
    """Return a digest of the code of smoe that proofs run, except the kernels and formats, which `key_of` adds."""
    return digest_of(compute, fastpath, load, memory, models, policy, runtime)


@functools.cache
def _system() -> list[Any]:
    """Return the system and the processor's microcode."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", ()) else None
    return [sys.platform, *os.uname()[2:], libc, *processor_lines(("microcode", "CPU revision"))]


@functools.cache
def _libraries() -> list[Any]:
    """Return the versions of the libraries that compute, and the identities of torch's shared libraries."""
    (folder,) = torch.__path__
    shared = sorted(path for path in (Path(folder) / "lib").iterdir() if path.is_file())
    versions = [sys.version, torch.__version__, torch.version.git_version, transformers.__version__, np.__version__]
    return [*versions, llvmlite_version(), torch.__config__.show(), _identities(shared)]


def _environment() -> list[tuple[str, str]]:
    names = (name for name in os.environ if name.startswith(_ENVIRONMENT) and name not in _UNRELATED)
    return sorted((name, os.environ[name]) for name in names)


def switches() -> list[Any]:
    """Return the switches of torch that can change the bits of results, and the numbers of threads."""
    attention = torch.backends.cuda  # these switches hold for the CPU as well
    return [
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        str(torch.get_default_dtype()),
        attention.flash_sdp_enabled(),
        attention.math_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
    ]


def _settings(config: EngineConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if name not in _NOT_PROVEN}


def _files_of_classes(model: nn.Module) -> list[Path]:
    """Return the source files that define the classes of the model's modules."""
    names = {type(module).__module__ for module in model.modules()}
    return sorted(Path(file) for name in names if (file := getattr(sys.modules.get(name), "__file__", None)))


def model_files(resolved: Resolved) -> list[Path]:
    """Return the files of a model: those in its folder, or the parts of its GGUF file, and the packs that are used."""
    place = resolved.checkpoint.place
    own = [path for path in place.iterdir() if path.is_file()] if place.is_dir() else part_paths(place)
    return sorted({*own, *(path for store in resolved.stores.values() for path in store.identities())})


def _identities(paths: Iterable[Path]) -> list[tuple[Any, ...]]:
    return list(_each_identity(paths))


def _each_identity(paths: Iterable[Path]) -> Iterator[tuple[Any, ...]]:
    """Yield each path with the numbers that change when the file is written or replaced."""
    for path in paths:
        found = path.stat()
        yield str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
