"""Finds a model's files: the embedded demo, a folder, a GGUF file, a hub repository, or one file of a hub repository.

Before a download, its size is compared with the free disk space. Code in a repository is never executed.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from smoe.errors import CheckpointError, ConfigError, DiskSpaceError, ModelError, SmoeError
from smoe.memory.gguf_header import is_gguf, part_paths, part_stem
from smoe.models import hub
from smoe.models.gguf_names import is_companion
from smoe.models.hub import no_model
from smoe.models.hub_gguf import cached_gguf, described_gguf, download_gguf, model_bytes, named_gguf
from smoe.units import format_bytes

_log = logging.getLogger(__name__)

DEMO = "demo"
"""The name of the embedded demonstration model."""
DEMO_FOLDER = Path(__file__).parent.parent / "demo"
DEMO_REMARK = (
    "demo is a toy that writes children's stories: it answers only simple questions about facts in the message; give a "
    "chat model for other questions"
)
"""What the user of a chat with the embedded model should know."""
_SPARE_BYTES = 2**30
_MOST_NAMES = 6
_WEIGHT_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".json")
_GIVE = "give a model folder, a GGUF file, a hub id such as Qwen/Qwen3-30B-A3B, or 'demo'"


def local_place(model: str | Path) -> Path | None:
    """Return the folder or GGUF file of a model on disk, or None if `model` has the form of a hub id.

    For a split GGUF model, return the path of its first file. Raise `ModelError` if `model` is a path and no model is
    there, and `ConfigError` if `model` is neither a text nor a path.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError.out_of_bounds("model", model, f"a text or a path: {_GIVE}")
    if str(model) == DEMO:
        if not (DEMO_FOLDER / "config.json").exists():
            raise ModelError(f"the embedded model is missing from {DEMO_FOLDER}; reinstall smoe")
        return DEMO_FOLDER
    if not str(model).strip():
        raise no_model(model, f"no model is named; {_GIVE}")
    if str(model).startswith(("http:", "https:")):
        why = "is an address; the hub id is its last part, owner/name"
        raise no_model(model, f"{model} {why}: {_GIVE}")
    path = _path_of(model)
    if path.is_dir():
        return _checked(path)
    if path.is_file() and is_gguf(path):
        return part_paths(path)[0]
    if path.exists() or path.is_symlink():
        raise no_model(model, _no_folder(path))
    gguf = named_gguf(str(model))
    if gguf is not None and not (gguf.wanted in path.parts[2:] and Path(path.parts[0]).is_dir()):
        return None
    if path.suffix.lower() in _WEIGHT_FILES:
        raise no_model(model, f"there is no file {path}{_near(path)}; {_reads(path)}")
    is_written_as_path = path.is_absolute() or str(model).startswith(("./", "../", "~")) or str(model).endswith("/")
    if is_written_as_path or not hub.is_id(str(model)) or (len(path.parts) == 2 and _near(path)):
        raise no_model(model, f"there is no folder {model}{_near(path)}; {_GIVE}")
    return None


def named_elsewhere(model: str) -> str:
    """Return a name of the model that is also valid in a process with another working directory."""
    path = _path_of(model)
    return str(path.absolute()) if model != DEMO and path.exists() else model


def _path_of(model: str | Path) -> Path:
    try:
        path = Path(model).expanduser()
        path.is_dir()  # raises for names that the file system does not allow
    except (OSError, ValueError, RuntimeError) as error:
        raise no_model(model, f"{str(model)!r:.200} is no path: {error}; {_GIVE}") from error
    return path


def _checked(folder: Path) -> Path:
    """Return the folder if it has a config.json, otherwise the path of its only GGUF file.

    Raise `CheckpointError` if it has neither. Also raise it if a small file of the model is not a regular file, because
    opening a pipe could block.
    """
    has_config = (folder / "config.json").exists()
    if not has_config or not any(folder.glob("*.safetensors*")):
        models = _gguf_models(folder)
        if len(models) > 1:
            names = ", ".join(path.name for path in models[:_MOST_NAMES]) + (", ..." if models[_MOST_NAMES:] else "")
            why = f"{folder} holds {len(models)} GGUF models: give the path of one of {names}"
            raise no_model(folder, why, CheckpointError)
        if models:
            return part_paths(models[0])[0]
    if not has_config:
        why = f"{folder} has no config.json; give the folder that holds a model's config and weights"
        raise no_model(folder, why, CheckpointError)
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not path.is_file():
            raise CheckpointError(f"{path} is not an ordinary file; download the checkpoint again")
    return folder


def _gguf_models(folder: Path) -> list[Path]:
    """Return the first file of every GGUF model in a folder. Files that only accompany a model are left out."""
    parts = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf" and path.is_file())
    first = {part_stem(path.name): path for path in reversed(parts) if not is_companion(path.name)}
    companions = tuple(path.name for path in parts if is_companion(path.name))
    if first and companions:
        _remark_companions(folder, companions)
    return sorted(first.values())


@cache
def _remark_companions(folder: Path, names: tuple[str, ...]) -> None:
    """Log, once per folder, the names of skipped files that only accompany a model."""
    _log.warning(
        "%s also holds %s: files of an image encoder, of a quantiser or of multi-token prediction, which are skipped",
        folder,
        ", ".join(names),
    )


def _no_folder(path: Path) -> str:
    """Return the error message for a path that is not a folder."""
    if path.is_symlink() and not path.exists():
        return f"{path} is a link that leads nowhere; {_GIVE}"
    return f"{path} is a file, not a model folder; {_reads(path)}"


def _reads(path: Path) -> str:
    """Return advice on which argument to give in place of a file that is not a model."""
    if path.suffix.lower() == ".gguf":
        return "to load a GGUF file from the hub, give OWNER/REPO/FILE.gguf or OWNER/REPO:Q4_K_M"
    own_folder = path.absolute().parent
    if (own_folder / "config.json").exists():
        return f"give its folder: {own_folder}"
    return "give the folder that holds the model's config.json and safetensors, a GGUF file, a hub id, or 'demo'"


def _near(path: Path) -> str:
    """Return a hint for a path that does not exist: similar names, or the closest existing folder; empty if there is
    neither."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        parent = next((each for each in path.parents if each.is_dir()), None)
        return f" (there is {parent}, but no {path.parent})" if parent not in (None, Path()) else ""
    names += [DEMO] if path.parent == Path() else []
    close = [str(path.parent / name) for name in get_close_matches(path.name, names, n=3, cutoff=0.7)]
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _place_on_disk(model: str | Path, revision: str | None) -> Path | None:
    """Return `local_place(model)`. Raise `ConfigError` if a revision is given for a model on disk."""
    place = local_place(model)
    if place is not None and revision is not None:
        raise ConfigError(
            f"`revision` is {revision!r}, but {model} is a model on disk, and only models of the hub have revisions: "
            "leave it out, or give a hub id such as Qwen/Qwen3-30B-A3B",
            setting="revision",
            given=revision,
            allowed="only with a hub id",
        )
    return place


def described_place(model: str | Path, revision: str | None) -> Path:
    """Return the path of a model's configuration. For a hub model, only the configuration (or the GGUF header) is
    downloaded."""
    place = _place_on_disk(model, revision)
    if place is not None:
        return place
    gguf = named_gguf(str(model))
    return hub.config_folder(str(model), revision) if gguf is None else described_gguf(gguf, revision)


def fetch(model: str | Path, revision: str | None) -> Path:
    """Return the folder or GGUF file of a model. A hub model is downloaded if necessary."""
    place = _place_on_disk(model, revision)
    if place is not None:
        return place
    gguf = named_gguf(str(model))
    place = hub.cached(str(model), revision) if gguf is None else cached_gguf(gguf, revision)
    if place is not None:
        return place
    size = hub.size_bytes(str(model), revision) if gguf is None else model_bytes(gguf, revision)
    check_disk(hub.cache_folder(), size, f"downloading {model}")
    return hub.download(str(model), revision) if gguf is None else download_gguf(gguf, revision)


def refuse_unknown(model: str, revision: str | None) -> None:
    """Raise `ModelError` if a model is unavailable, and `ConfigError` for a revision of a model on disk.

    The check takes seconds at most and imports nothing heavy.
    """
    if _place_on_disk(model, revision) is not None:
        return
    gguf = named_gguf(model)
    is_here = hub.has_config(model, revision) if gguf is None else cached_gguf(gguf, revision) is not None
    if not is_here:
        hub.check_reachable(model)


def check_disk(where: Path, needed_bytes: int, purpose: str) -> None:
    """Raise `DiskSpaceError` if the disk of the path `where` has less than `needed_bytes` free, plus a reserve."""
    existing = next(p for p in [where, *where.parents] if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + _SPARE_BYTES:
        raise DiskSpaceError(
            f"{purpose} needs {format_bytes(needed_bytes)}, and {format_bytes(_SPARE_BYTES)} must remain free; the "
            f"disk of {existing} has {format_bytes(free)} free: free some space on it"
        )


@contextmanager
def naming(what: str, error: type[ModelError] = CheckpointError) -> Iterator[None]:
    """During the `with` block, convert any exception that a library raises about a checkpoint to the class `error`. The
    message begins with `what`.

    The libraries do not document their exceptions for damaged files. The parser in tokenizers may even panic, which
    does not raise an `Exception`.
    """
    try:
        yield
    except SmoeError:
        raise
    except Exception as caught:
        raise error(f"{what}: {reason_of(caught)}") from caught
    except BaseException as caught:
        if type(caught).__name__ != "PanicException":
            raise
        raise error(f"{what}: {reason_of(caught)}") from caught


def reason_of(error: BaseException) -> str:
    """Return an exception's type and the beginning of its message in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2])
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
