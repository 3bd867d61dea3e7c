"""Check that pyzmq is installed. This module imports nothing heavy, because workers without torch use it too."""

from __future__ import annotations

from smoe.errors import ConfigError


def check_zmq() -> None:
    """Raise `ConfigError` if pyzmq, by which the machines of a cluster communicate, is not installed."""
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "a cluster needs pyzmq, which is not installed; run: pip install 'smoe[cluster]'",
            setting="cluster",
            given="a cluster",
            allowed="requires pyzmq",
        ) from error
