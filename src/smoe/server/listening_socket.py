"""The server's socket and its addresses. Imports nothing heavy: a port in use is refused before anything is loaded.

bound    the port is reserved for this process; connections are refused
opened   connections wait until the server accepts them
"""

from __future__ import annotations

import errno
import ipaddress
import socket

from smoe.errors import ConfigError
from smoe.server.settings import ServerConfig

_ELSEWHERE = "192.0.2.1"
"""An address reserved for documentation. The system's route to this address begins at the machine's own address."""


def bound(config: ServerConfig) -> socket.socket:
    """Return a socket that is bound to the server's address. Raises `ConfigError` if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        bound_socket = socket.socket(family, kind, protocol)
        try:
            bound_socket.setsockopt(socket.SOL_SOCKET, _alone(), 1)
            bound_socket.bind(address)
        except OSError:
            bound_socket.close()
            raise
    except (OSError, UnicodeError) as error:
        raise _refused(config, error) from error
    return bound_socket


def _alone() -> int:
    """Return the socket option that reserves the port for one process and still allows a restart at once. On Windows,
    SO_REUSEADDR would let a second server use the port."""
    return int(getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR))


def opened(bound_socket: socket.socket, config: ServerConfig) -> None:
    """Let the socket accept connections. Raises `ConfigError` if another process has begun to listen on the port."""
    try:
        bound_socket.listen()
    except OSError as error:
        raise _refused(config, error) from error


def address_of(bound_socket: socket.socket) -> str:
    """Return the URL by which this machine reaches the server."""
    host, port = bound_socket.getsockname()[:2]
    return _url("localhost" if ipaddress.ip_address(host).is_unspecified else host, port)


def addresses_of(bound_socket: socket.socket) -> list[str]:
    """Return the URLs of the server: the URL for this machine and, if it is different, the URL for other machines."""
    host, port = bound_socket.getsockname()[:2]
    here = [address_of(bound_socket)]
    if not ipaddress.ip_address(host).is_unspecified:
        return here
    own = _own_address(bound_socket.family)
    return here if own is None else [*here, _url(own, port)]


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _own_address(family: int) -> str | None:
    """Return the IP address by which other machines reach this machine. It is taken from the system's routes, and
    nothing is sent. None if there is no such address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE, 9))
            own = str(probe.getsockname()[0])
        except OSError:
            own = socket.gethostname() if family == socket.AF_INET6 else ""
    return own or None


def _refused(config: ServerConfig, error: OSError | UnicodeError) -> ConfigError:
    number = getattr(error, "errno", None)
    is_of_the_host = isinstance(error, (socket.gaierror, UnicodeError)) or number == errno.EADDRNOTAVAIL
    about = "host" if is_of_the_host else "port"
    why = getattr(error, "strerror", None) or str(error)
    if number == errno.EADDRINUSE:
        why += _by_whom(config.port)
    choices = "127.0.0.1: this machine only; 0.0.0.0: all its addresses" if is_of_the_host else "0: any free one"
    instead = f"give another `{about}` ({choices})"
    return ConfigError(
        f"cannot listen at `host={config.host}`, `port={config.port}`: {why}; {instead}",
        setting=about,
        given=getattr(config, about),
        allowed="an address of this machine and a port that is free",
    )


def _by_whom(port: int) -> str:
    """Return a phrase with the names of the processes that listen on the port, if the system reports them."""
    import psutil

    try:
        found = {
            each.pid for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port and each.pid
        }
        names = [f"{psutil.Process(pid).name()} (process {pid})" for pid in sorted(found)]
    except (psutil.Error, OSError, RuntimeError):  # the system may not permit the query
        return ""
    return f" by {', '.join(names)}" if names else ""
