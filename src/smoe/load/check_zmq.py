"""Whether machines can talk here. Imports nothing heavy: a worker without torch asks, too."""

from __future__ import annotations

from smoe.errors import ConfigError


def check_zmq() -> None:
    """Raise `ConfigError` where the library that machines talk by is not installed."""
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "a cluster needs pyzmq, which is not installed; run: pip install 'smoe[cluster]'",
            setting="cluster",
            given="a cluster",
            allowed="requires pyzmq",
        ) from error
