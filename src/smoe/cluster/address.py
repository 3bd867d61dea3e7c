"""Addresses on which the coordinator listens and to which workers connect: `tcp://HOST:PORT`. HOST is an IPv4 or [IPv6]
address of the coordinator's machine, or a host name.

Both ends resolve a name to its IPv4 address if it has one, else to its IPv6 address. Wildcard addresses are refused,
because no worker could connect to them; a separate setting makes the coordinator listen on all interfaces.
"""

from __future__ import annotations

import errno
import re
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

from smoe.errors import ClusterError

DEFAULT_PORT = 5717
_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?\.?")
_WITH_PORT = re.compile(r"(\[[^\]]*\]|[^:\[\]]*):([0-9]{1,5})")


class Endpoint(NamedTuple):
    """The URL with which a socket is bound or connected (`tcp://HOST:PORT`), and whether the socket must use IPv6."""

    address: str
    is_ipv6: bool


def checked_address(given: str) -> str:
    """Return the address as `tcp://HOST:PORT`. An address without a port gets the default port. Raises `ClusterError`
    unless the address names one machine."""
    text = given.removeprefix("tcp://")
    bare = _ip(text)
    found = None if bare is not None else _WITH_PORT.fullmatch(text)
    host, port = (found[1], int(found[2])) if found is not None else (text, DEFAULT_PORT)
    ip = _ip(host)
    if host == "*" or (ip is not None and _is_wildcard(ip)):
        raise _refused(given, "stands for every interface of a machine, so no worker could connect to it")
    if ip is not None and (ip.is_multicast or str(ip) == "255.255.255.255"):
        raise _refused(given, "is not the address of one machine")
    if isinstance(ip, IPv6Address) and ip.scope_id is not None:
        raise _refused(given, "is valid on its own link only, and its zone (%) on one machine only")
    if not 0 < port < 65536 or (ip is None and not _NAME.fullmatch(host)):
        raise _refused(given, "is not an address")
    return f"tcp://{_in_url(ip) if ip is not None else host}:{port}"


def check_own(address: str) -> None:
    """Raise `ClusterError` if the coordinator cannot listen on this IP address, because the machine does not have it.
    Names are not checked, because they may resolve differently later."""
    ip = _ip(_parts(checked_address(address))[0])
    if ip is None:
        return
    try:
        with socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET) as tried:
            tried.bind((str(ip), 0))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise _refused(address, "is not an address of this machine") from error


def to_listen_at(address: str, everywhere: bool) -> Endpoint:
    """Return the address to which the coordinator's socket is bound. Raises `ClusterError` for a name that does not
    resolve, or that resolves to all interfaces."""
    host, port = _parts(checked_address(address))
    if everywhere:
        return Endpoint(f"tcp://*:{port}", True)  # both kinds, where the machine has both
    ip = _ip(host) or _resolved(host)
    if _is_wildcard(ip):
        raise _refused(address, f"resolves to {ip} here, which stands for every interface")
    return Endpoint(f"tcp://{_in_url(ip)}:{port}", ip.version == 6)


def to_connect_to(address: str) -> Endpoint:
    """Return the address to which a worker's socket connects. A name is resolved again whenever the connection is lost.

    Raises `ClusterError` for a name that does not resolve.
    """
    host, port = _parts(address)
    ip = _ip(host)
    return Endpoint(f"tcp://{host if ip is None else _in_url(ip)}:{port}", (ip or _resolved(host)).version == 6)


def reach_of(address: str, everywhere: bool) -> str:
    """Return a sentence that says where the coordinator listens, and from where it can be reached. Raises
    `ClusterError` as `to_listen_at` does."""
    bound, _ = to_listen_at(address, everywhere)
    if everywhere:
        return (
            f"{bound}, open to every machine that reaches this one through any interface; workers connect to {address}"
        )
    ip = _ip(_parts(bound)[0])
    assert ip is not None
    if ip.is_loopback:
        return f"{bound}, open to this machine only"
    return f"{bound}, open to every machine that reaches this address" + (" (a public one)" if ip.is_global else "")


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host[1:-1] if host[:1] + host[-1:] == "[]" else host)
    except ValueError:
        return None


def _in_url(ip: IPv4Address | IPv6Address) -> str:
    return f"[{ip}]" if ip.version == 6 else str(ip)


def _is_wildcard(ip: IPv4Address | IPv6Address) -> bool:
    inner = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return (inner or ip).is_unspecified


def _resolved(name: str) -> IPv4Address | IPv6Address:
    """Return the address to which a name resolves on this machine, IPv4 before IPv6. Raises `ClusterError` if it does
    not resolve."""
    try:
        found = [ip_address(str(each[4][0]).partition("%")[0]) for each in socket.getaddrinfo(name, None)]
    except (OSError, UnicodeError) as error:
        raise _refused(name, f"is a name that this machine cannot resolve ({error})") from error
    return min(found, key=lambda ip: ip.version)


def _refused(given: str, why: str) -> ClusterError:
    return ClusterError(
        f"`address` is {given!r:.80}, which {why}; give the coordinator's own address, such as 192.168.1.5, "
        f"tcp://192.168.1.5:{DEFAULT_PORT} or [fd00::5], or its host name (to listen on all interfaces, also give "
        "`every_interface`)",
        setting="address",
        given=given,
        allowed="HOST or tcp://HOST:PORT, HOST an address of one machine, or a name",
    )
