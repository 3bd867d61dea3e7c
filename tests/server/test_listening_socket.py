"""The socket before anything heavy. Would catch an address that nobody can open, a port that two servers believe to
have."""

from __future__ import annotations

import socket

import pytest

from smoe.errors import ConfigError
from smoe.server.listening_socket import address_of, addresses_of, bound, opened
from smoe.server.settings import ServerConfig


def test_all_interfaces_are_told_by_addresses_that_can_be_opened() -> None:
    config = ServerConfig(host="0.0.0.0", port=0, no_auth=True)
    with bound(config) as bound_socket:
        opened(bound_socket, config)
        port = bound_socket.getsockname()[1]
        told = addresses_of(bound_socket)
        assert told[0] == address_of(bound_socket) == f"http://localhost:{port}"
        for address in told:
            host = address.removeprefix("http://").removesuffix(f":{port}")
            assert host not in ("0.0.0.0", "")
            socket.create_connection((host, port), 10).close()


def test_one_interface_is_told_as_it_is() -> None:
    with bound(ServerConfig(port=0)) as bound_socket:
        assert addresses_of(bound_socket) == [f"http://127.0.0.1:{bound_socket.getsockname()[1]}"]


def test_of_two_that_are_bound_the_second_to_listen_is_refused() -> None:
    """Both loaded their models meanwhile: until somebody listens, the system lets two have a port."""
    with bound(ServerConfig(port=0)) as first:
        config = ServerConfig(port=first.getsockname()[1])
        try:
            second = bound(config)
        except ConfigError:
            pytest.skip("this system gives a port once")
        with second:
            opened(first, config)
            with pytest.raises(ConfigError, match=rf"`port={config.port}`: .* in use") as error:
                opened(second, config)
        assert error.value.setting == "port" and "0: any free one" in str(error.value)
