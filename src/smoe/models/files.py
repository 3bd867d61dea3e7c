"""Where a model's files are: the embedded demo, a folder, or a repository of the hub.

Nothing is downloaded before its size is known to fit the disk, and nothing of a repository is ever executed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from smoe.errors import CheckpointError, DiskSpaceError, ModelError
from smoe.units import format_bytes

DEMO = "demo"
"""The name of the embedded demonstration model."""
DEMO_FOLDER = Path(__file__).parent.parent / "demo"
_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]
_SPARE_BYTES = 2**30
HUB_HINT = "; check the name, the network, and for gated models that you are logged in (hf auth login)"
"""What to do where the hub does not give a model."""


def local_folder(model: str | Path) -> Path | None:
    """The folder of a model that is on disk already, else None; raises where a path was meant and nothing is there."""
    if str(model) == DEMO:
        if not (DEMO_FOLDER / "config.json").exists():
            raise ModelError(f"the embedded model is missing from {DEMO_FOLDER}; reinstall smoe")
        return DEMO_FOLDER
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise CheckpointError(
                f"{path} has no config.json; give the folder that holds a model's config and safetensors"
            )
        return path
    if path.is_absolute() or str(model).startswith(("./", "../", "~")) or str(model).count("/") > 1:
        raise ModelError(
            f"there is no folder {path}; give a model folder, a hub id such as Qwen/Qwen3-30B-A3B, or 'demo'"
        )
    return None


def fetch(model: str | Path, revision: str | None) -> Path:
    """The folder of a model, downloaded from the hub if need be."""
    folder = local_folder(model)
    if folder is not None:
        return folder
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), revision=revision, allow_patterns=_WANTED, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        info = HfApi().model_info(str(model), revision=revision, files_metadata=True)
        size = sum(f.size or 0 for f in info.siblings or () if Path(f.rfilename).match("*.safetensors"))
        check_disk(Path(constants.HF_HUB_CACHE), size, f"downloading {model}")
        return Path(snapshot_download(str(model), revision=revision, allow_patterns=_WANTED))
    except DiskSpaceError:
        raise
    except Exception as error:  # the network stack below the hub has error kinds of its own
        raise ModelError(
            f"{model!r} is neither a folder here nor a model that the hub gives: {_first_line(error)}{HUB_HINT}"
        ) from error


def check_disk(where: Path, needed_bytes: int, purpose: str) -> None:
    """Raise `DiskSpaceError` unless `needed_bytes` and a spare fit the disk of `where`."""
    existing = next(p for p in [where, *where.parents] if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + _SPARE_BYTES:
        raise DiskSpaceError(
            f"{purpose} needs {format_bytes(needed_bytes)} and {format_bytes(_SPARE_BYTES)} to spare; "
            f"{existing} has {format_bytes(free)} free"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
