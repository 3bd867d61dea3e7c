"""The hub: what of a model is in its cache, whether it answers, and downloads.

Its own client tries an unreachable network for half a minute. So the network is looked at first, for two seconds at
most, and a missing connection is one line; where it answers, the client has all the patience of its own.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from smoe.errors import ModelError, SmoeError
from smoe.models.gguf_names import labels_of
from smoe.models.stated_quantisation import MODELOPT_FILE

HINT = "; check the name, the network, and for gated models that you are logged in (hf auth login)"
"""What to do where the hub does not give a model."""
PATIENCE_SECONDS = 2.0
"""How long a connection may take; HF_HUB_ETAG_TIMEOUT, the client's own setting, stands above it."""
_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]
_UNWANTED = ["*/*.safetensors"]
"""Folders hold the same weights once more, in forms that nothing here reads (gpt-oss has them as `original`)."""
_FILES: Any = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
_MOST_LABELS = 12
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def is_id(model: str) -> bool:
    """Whether `model` has the form owner/name. (The hub knows names without owner; none has routed experts.)"""
    return bool(_ID.fullmatch(model)) and "--" not in model and ".." not in model and not model.endswith((".git", "."))


def has_config(model: str, revision: str | None) -> bool:
    """Whether the cache holds the model's config.json."""
    return _cached_config(model, revision) is not None


def config_folder(model: str, revision: str | None) -> Path:
    """A folder of the cache that holds the model's config.json, and what else states how it is quantised, downloaded
    where the hub answers."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    known = _cached_config(model, revision)
    if known is not None and unreachable() is not None:
        return known.parent
    with asking(model):
        try:
            folder = Path(hf_hub_download(model, "config.json", revision=revision)).parent
        except EntryNotFoundError:
            _refuse_gguf(model, files_of(model, revision))
            raise
        with suppress(EntryNotFoundError):  # few releases state there how they are quantised
            hf_hub_download(model, MODELOPT_FILE, revision=revision)
        return folder


def cached(model: str, revision: str | None) -> Path | None:
    """The folder of a model that was downloaded before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True, **_FILES))
    except LocalEntryNotFoundError:
        return None


def size_bytes(model: str, revision: str | None) -> int:
    """What a download would bring."""
    with asking(model):
        files = files_of(model, revision)
        _refuse_gguf(model, files)
        return sum(size for name, size in files.items() if _is_wanted(name))


def _is_wanted(name: str) -> bool:
    """Whether a file of a repository is one of the weights that are read."""
    return name.endswith(".safetensors") and "/" not in name


def files_of(model: str, revision: str | None) -> dict[str, int]:
    """What a repository holds: bytes by name."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(model, revision=revision, files_metadata=True)
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _refuse_gguf(model: str, files: Mapping[str, int]) -> None:
    """Raise `ModelError` for a repository that has GGUF files alone: which of them is wanted, its name does not say."""
    labels = labels_of(files)
    if labels and not any(name.endswith(".safetensors") for name in files):
        listed = ", ".join(labels[:_MOST_LABELS]) + (", ..." if labels[_MOST_LABELS:] else "")
        first = f"{model}/{labels[0]}" if labels[0].lower().endswith(".gguf") else f"{model}:{labels[0]}"
        raise ModelError(f"{model!r} holds GGUF files alone ({listed}); give one of them, as {first}")


def download(model: str, revision: str | None) -> Path:
    """Bring a model into the cache."""
    from huggingface_hub import snapshot_download

    with asking(model):
        return Path(snapshot_download(model, revision=revision, **_FILES))


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def check_reachable(model: str) -> None:
    """Raise `ModelError` where the hub cannot be asked for `model`."""
    reason = unreachable()
    if reason is not None:
        raise no_model(
            model,
            f"{model!r} is neither a folder here nor in the hub's cache ({cache_folder()}), and {reason}; give a "
            "folder, or run this once where there is a network" + HINT,
        )


def unreachable() -> str | None:
    """Why the hub cannot be asked; None where a connection comes about, if only to a proxy."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to ask the hub"
    host, port = _first_hop(constants.ENDPOINT)
    patience = max(PATIENCE_SECONDS, float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 0))
    failures: list[str] = []
    # in a thread: looking a name up takes as long as it likes
    attempt = threading.Thread(target=_connect, args=(host, port, patience, failures), daemon=True)
    attempt.start()
    attempt.join(patience)
    if attempt.is_alive():
        failures.append(f"no answer in {patience:g} s; HF_HUB_ETAG_TIMEOUT=30 waits longer")
    return f"{host} cannot be reached ({failures[0]})" if failures else None


def _first_hop(endpoint: str) -> tuple[str, int]:
    """Host and port of the hub, or of the proxy on the way to it."""
    hub = urlsplit(endpoint)
    proxy = None if proxy_bypass(hub.hostname or "") else getproxies().get(hub.scheme, getproxies().get("all"))
    hop = hub if proxy is None else urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    return hop.hostname or "huggingface.co", hop.port or (443 if hop.scheme == "https" else 80)


def _connect(host: str, port: int, patience: float, failures: list[str]) -> None:
    try:
        socket.create_connection((host, port), timeout=patience).close()
    except OSError as error:
        failures.append(error.strerror or str(error))


def _cached_config(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found: Any = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found) if isinstance(found, str) else None


@contextmanager
def asking(model: str) -> Iterator[None]:
    """Inside the hub is asked, which is known to answer; its errors, of many kinds, become a `ModelError`."""
    check_reachable(model)
    try:
        yield
    except SmoeError:
        raise
    except Exception as error:  # the network stack below the hub has error kinds of its own
        lines = str(error).strip().splitlines() or [type(error).__name__]
        message = f"{model!r} is neither a folder here nor a model that the hub gives: {lines[0]}{HINT}"
        raise no_model(model, message) from error


def no_model(model: str | Path, message: str, kind: type[ModelError] = ModelError) -> ModelError:
    """What was given is no model that can be had."""
    return kind(message, setting="model", given=str(model), allowed="a model folder, a GGUF file, a hub id, or 'demo'")
