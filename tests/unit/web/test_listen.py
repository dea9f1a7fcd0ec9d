"""Addresses: what is one, what is none, and what cannot be had."""

from __future__ import annotations

import socket

import pytest

from ceilingd.web.listen import ListenError, listen, parse_listen_address


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:9939", ("127.0.0.1", 9939)),
        ("[::1]:9939", ("::1", 9939)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        (":9939", ("", 9939)),
        ("localhost:0", ("localhost", 0)),
        ("gpu-host_3.example:65535", ("gpu-host_3.example", 65535)),
    ],
)
def test_addresses(text: str, parsed: tuple[str, int]) -> None:
    assert parse_listen_address(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9939",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:65536",
        "127.0.0.1:-1",
        "127.0.0.1:http",
        "::1:9939",
        "[127.0.0.1]:9939",
        "[]:9939",
        "[::1]9939",
        "http://127.0.0.1:9939",
        "a b:1",
        "127.0.0.1:9939\n",
        "127.0.0.1:９",
    ],
)
def test_what_is_no_address_is_named_with_the_cure(text: str) -> None:
    with pytest.raises(ListenError, match=r"is not an address: write HOST:PORT, \[IPV6\]:PORT, or :PORT") as raised:
        parse_listen_address(text)
    assert repr(text) in str(raised.value)


async def test_a_port_in_use_is_named_with_the_cure() -> None:
    [first] = await listen("127.0.0.1:0")
    with first:
        address = f"127.0.0.1:{first.getsockname()[1]}"
        with pytest.raises(ListenError, match=f"cannot listen on {address}: another program has this port; .* another port"):
            await listen(address)


async def test_an_address_of_another_host_is_named_with_the_cure() -> None:
    with pytest.raises(
        ListenError, match=r"cannot listen on 192\.0\.2\.1:0: this host has no such address; set listen_address"
    ):
        await listen("192.0.2.1:0")


async def test_a_name_that_does_not_resolve_is_named_with_the_cure() -> None:
    with pytest.raises(
        ListenError, match=r"cannot listen on nowhere\.invalid:1: the host name does not resolve .* set listen_address"
    ):
        await listen("nowhere.invalid:1")


async def test_no_host_is_every_interface_of_both_families() -> None:
    sockets = await listen(":0")
    try:
        port = sockets[0].getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=5).close()
    finally:
        for bound in sockets:
            bound.close()


async def test_all_addresses_of_a_name_have_the_same_port() -> None:
    sockets = await listen("localhost:0")
    try:
        assert len({bound.getsockname()[1] for bound in sockets}) == 1
    finally:
        for bound in sockets:
            bound.close()
