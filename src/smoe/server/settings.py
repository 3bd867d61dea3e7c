"""The server's settings: its address, who may use it, and its limits."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path

from smoe.errors import ConfigError

LOOPBACK = "127.0.0.1"
FEWEST_CONNECTIONS = 8
ALLOWED_KEY = "printable ASCII without spaces"
KEY_FORM = f"a key must be one line of {ALLOWED_KEY}, because it is sent in a header"


@dataclass(frozen=True)
class ServerConfig:
    """The settings of one server, checked when the object is made. If other machines can reach the server, it needs a
    key or `no_auth`."""

    host: str = LOOPBACK
    """An address of this machine; one that other machines can reach needs `api_key` or `no_auth`."""
    port: int = 8000
    """The port; 0: any free one."""
    api_key: str | None = field(default=None, repr=False)
    """The key that clients must send; None: clients need no key."""
    no_auth: bool = False
    """Answer every client that can reach `host`, without a key."""
    allow_origin: tuple[str, ...] = ()
    """Origins of other web pages that may send requests: `https://chat.example`; `*` for all."""
    max_waiting: int = 64
    """The length of the queue; further requests get 429."""
    max_body_bytes: int = 4 << 20
    max_bodies_bytes: int | None = None
    """The memory, in bytes, for all bodies that are being received or wait until their prompts are rendered; further
    ones get status 429. None: eight times `max_body_bytes`."""
    max_connections: int = 512
    """The largest number of open connections; fewer if the process may not open so many files. A new connection
    replaces the one that has waited longest for its request."""
    head_seconds: float = 10.0
    """The time limit for receiving a request's head."""
    body_seconds: float = 60.0
    """The time limit for receiving a request's body."""
    idle_seconds: float = 30.0
    """Seconds after which a connection without a request is closed, counted from its last response."""
    unread_seconds: float = 60.0
    """Seconds after which a client is disconnected that does not read its response."""
    exit_on_failure: bool = False
    """Whether the server ends when the model can no longer be used."""
    parses_control_tokens: bool = False
    """Whether the text of a control token in a message becomes that token; otherwise it stays text."""
    image_folder: Path | None = None
    """The folder whose files requests may name as images by `file://` URLs; None: requests may name no files."""
    is_strict: bool = False
    """Whether requests with unknown fields are refused; otherwise the fields are ignored."""
    drain_seconds: float = 30.0
    """For how many seconds texts in progress may continue when the server shuts down."""

    def __post_init__(self) -> None:
        for name, holds, allowed in (
            ("port", 0 <= self.port < 2**16, "between 0 (any free one) and 65535"),
            ("max_waiting", self.max_waiting >= 1, "a whole number of at least 1"),
            ("max_body_bytes", self.max_body_bytes >= 1024, "at least 1 KiB"),
            (
                "max_bodies_bytes",
                self.most_bodies_bytes >= self.max_body_bytes,
                f"at least `max_body_bytes`, {self.max_body_bytes}",
            ),
            ("max_connections", self.max_connections >= FEWEST_CONNECTIONS, f"at least {FEWEST_CONNECTIONS}"),
            *(
                (name, 0 < getattr(self, name) < math.inf, "a number of seconds above 0")
                for name in ("head_seconds", "body_seconds", "idle_seconds", "unread_seconds")
            ),
            ("drain_seconds", 0 <= self.drain_seconds < math.inf, "a number of seconds of at least 0"),
        ):
            if not holds:
                raise ConfigError.out_of_bounds(name, getattr(self, name), allowed)
        self._check_key()
        if self.image_folder is not None and not self.image_folder.is_dir():
            raise ConfigError.out_of_bounds("image_folder", str(self.image_folder), "a folder on this machine")
        for origin in self.allow_origin:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (not scheme or not rest or "/" in rest):
                raise ConfigError.out_of_bounds("allow_origin", origin, "an origin such as https://chat.example, or *")

    def _check_key(self) -> None:
        if self.api_key is not None and (fault := key_fault(self.api_key)):
            raise ConfigError(
                f"the `api_key` {fault}; {KEY_FORM}", setting="api_key", given="another", allowed=ALLOWED_KEY
            )
        if self.api_key is not None and self.no_auth:
            raise ConfigError(
                "`api_key` and `no_auth` exclude each other; leave one out",
                setting="no_auth",
                given=True,
                allowed="false with `api_key`",
            )
        if not self.is_local and self.api_key is None and not self.no_auth:
            raise ConfigError(
                f"`host={self.host}` accepts requests of other machines; give an `api_key` that they must send (in "
                "the environment: SMOE_API_KEY), or `no_auth` to answer every client that can reach it",
                setting="host",
                given=self.host,
                allowed=f"{LOOPBACK} without `api_key` or `no_auth`",
            )

    @property
    def most_bodies_bytes(self) -> int:
        """The maximum number of bytes of request bodies in memory at once."""
        return 8 * self.max_body_bytes if self.max_bodies_bytes is None else self.max_bodies_bytes

    @property
    def is_local(self) -> bool:
        """Whether only this machine can send requests."""
        return is_loopback(self.host)


def key_fault(key: str) -> str | None:
    """Return why a text cannot be a key, as the end of a sentence that does not contain the key; None if it can."""
    if not key:
        return "is empty"
    if (lines := len(key.splitlines())) > 1:
        return f"has {lines} lines"
    for number, character in enumerate(key, start=1):
        if not "!" <= character <= "~":
            what = "a space" if character == " " else "an unprintable character"
            return f"has {what if character.isascii() else 'a letter outside ASCII'} (character {number})"
    return None


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address (`::1` with or without brackets) is this machine's own."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
