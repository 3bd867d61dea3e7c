"""A check that the server's libraries are installed. It imports nothing heavy, so the command line calls it before the
model is loaded."""

from __future__ import annotations

from importlib.util import find_spec

from smoe.errors import ConfigError

_NEEDED = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
    "llguidance": "llguidance",
}


def check_server() -> None:
    """Raise `ConfigError` if a library that the server needs is not installed."""
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"a server needs {', '.join(missing)}, which this Python installation lacks; run, in the copy of "
            "the repository: pip install '.[serve]'",
            setting="serve",
            given="a server",
            allowed=f"requires {', '.join(missing)}",
        )
