"""Access to the Hugging Face hub: its local cache, whether it can be reached, and downloads.

If the network is down, the hub's own client retries for half a minute. So smoe first tries to connect, for two seconds,
and reports a failure in one line. If the hub responds, the client's own timeouts apply.
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

from smoe.errors import ModelError, SmoeError
from smoe.models.gguf_names import labels_of

MODELOPT_FILE = "hf_quant_config.json"
"""The file in which ModelOpt writes the settings of a quantized checkpoint."""
HINT = "; check the name, the network, and for gated models that you are logged in (hf auth login)"
"""The advice at the end of messages about models that the hub does not provide."""
PATIENCE_SECONDS = 2.0
"""The longest time for an attempt to connect. HF_HUB_ETAG_TIMEOUT, a setting of the client, can raise it."""
_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]
_UNWANTED = ["*/*.safetensors"]
"""Patterns for weights in subfolders: duplicates in formats that smoe does not read (gpt-oss has one in `original`)."""
_FILES: Any = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
_MOST_LABELS = 12
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def is_id(model: str) -> bool:
    """Return whether `model` has the form owner/name of a hub id. Some hub models have names without an owner, but none
    of these has routed experts."""
    return bool(_ID.fullmatch(model)) and "--" not in model and ".." not in model and not model.endswith((".git", "."))


def has_config(model: str, revision: str | None) -> bool:
    """Return whether the hub's local cache holds the model's config.json."""
    return _cached_config(model, revision) is not None


def config_folder(model: str, revision: str | None) -> Path:
    """Return the cache folder with the model's config.json and quantization settings. They are downloaded if the hub
    responds."""
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
        with suppress(EntryNotFoundError):  # most checkpoints lack this file
            hf_hub_download(model, MODELOPT_FILE, revision=revision)
        return folder


def cached(model: str, revision: str | None) -> Path | None:
    """Return the cache folder of a model that is completely downloaded, otherwise None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True, **_FILES))
    except LocalEntryNotFoundError:
        return None


def size_bytes(model: str, revision: str | None) -> int:
    """Return the size in bytes of the model's weights that a download would transfer."""
    with asking(model):
        files = files_of(model, revision)
        _refuse_gguf(model, files)
        return sum(size for name, size in files.items() if _is_wanted(name))


def _is_wanted(name: str) -> bool:
    """Return whether a file of a repository contains weights that smoe reads."""
    return name.endswith(".safetensors") and "/" not in name


def files_of(model: str, revision: str | None) -> dict[str, int]:
    """Return {file of a repository: its bytes}."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(model, revision=revision, files_metadata=True)
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _refuse_gguf(model: str, files: Mapping[str, int]) -> None:
    """Raise `ModelError`, with a list of the files, for a repository that only contains GGUF files."""
    labels = labels_of(files)
    if labels and not any(name.endswith(".safetensors") for name in files):
        listed = ", ".join(labels[:_MOST_LABELS]) + (", ..." if labels[_MOST_LABELS:] else "")
        first = f"{model}/{labels[0]}" if labels[0].lower().endswith(".gguf") else f"{model}:{labels[0]}"
        raise ModelError(f"{model!r} contains only GGUF files ({listed}); give one of them, such as {first}")


def download(model: str, revision: str | None) -> Path:
    """Download a model into the cache and return its folder."""
    from huggingface_hub import snapshot_download

    with asking(model):
        return Path(snapshot_download(model, revision=revision, **_FILES))


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def check_reachable(model: str) -> None:
    """Raise `ModelError` if the hub cannot be reached for `model`."""
    reason = unreachable()
    if reason is not None:
        raise no_model(
            model,
            f"{model!r} is neither a folder here nor in the hub's cache ({cache_folder()}), and {reason}; give a "
            "folder, or run this once where there is a network" + HINT,
        )


def unreachable() -> str | None:
    """Return why the hub cannot be reached, or None if a connection succeeds (to the hub or its proxy)."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so the hub is not asked"
    host, port = _first_hop(constants.ENDPOINT)
    patience = max(PATIENCE_SECONDS, float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 0))
    failures: list[str] = []
    # in a thread, because a name lookup has no timeout
    attempt = threading.Thread(target=_connect, args=(host, port, patience, failures), daemon=True)
    attempt.start()
    attempt.join(patience)
    if attempt.is_alive():
        failures.append(f"no answer in {patience:g} s; HF_HUB_ETAG_TIMEOUT=30 waits longer")
    return f"{host} cannot be reached ({failures[0]})" if failures else None


def _first_hop(endpoint: str) -> tuple[str, int]:
    """Return host and port of the hub, or of the proxy for it."""
    from urllib.request import getproxies, proxy_bypass  # with the modules of HTTP, which most commands do not need

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
    """Raise `ModelError` if the hub cannot be reached. During the `with` block, convert any error of its client to
    `ModelError`."""
    check_reachable(model)
    try:
        yield
    except SmoeError:
        raise
    except Exception as error:  # the client's network stack raises errors of its own
        lines = str(error).strip().splitlines() or [type(error).__name__]
        message = f"{model!r} is neither a folder here nor a model that the hub gives: {lines[0]}{HINT}"
        raise no_model(model, message) from error


def no_model(model: str | Path, message: str, kind: type[ModelError] = ModelError) -> ModelError:
    """Return the error for an argument `model` that names no available model."""
    return kind(message, setting="model", given=str(model), allowed="a model folder, a GGUF file, a hub id, or 'demo'")
