"""Listening: from HOST:PORT to sockets."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import re
import socket

BACKLOG = 128
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^][]*)\]|(?P<host>[A-Za-z0-9._-]*)):(?P<port>[0-9]{1,5})")


class ListenError(Exception):
    """The address cannot be listened on. One sentence that names it and the cure."""


def parse_listen_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, [IPV6]:PORT or :PORT; the host is empty for all interfaces. Raises `ListenError`.

    >>> parse_listen_address("[::1]:9939"), parse_listen_address(":0")
    (('::1', 9939), ('', 0))
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535 or not _is_ipv6_or_none(match["ipv6"]):
        raise ListenError(
            f"listen_address {text!r} is not an address: write HOST:PORT, [IPV6]:PORT, or :PORT for all interfaces, "
            "with a port from 0 (any free one) to 65535"
        )
    return match["host"] if match["ipv6"] is None else match["ipv6"], int(match["port"])


def _is_ipv6_or_none(text: str | None) -> bool:
    if text is None:
        return True
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


async def listen(address: str) -> list[socket.socket]:
    """Bound, listening sockets: one, or one for each address of a host name that has several. All have the same port.

    No host, or `[::]`, is every interface, IPv4 and IPv6. Raises `ListenError`."""
    host, port = parse_listen_address(address)
    everywhere = host in ("", "::") and socket.has_dualstack_ipv6()
    if everywhere:
        wanted = [(socket.AF_INET6, "::")]
    else:
        wanted = await _resolve(address, host or "0.0.0.0")  # noqa: S104  # asked for
    sockets: list[socket.socket] = []
    try:
        for family, numeric in wanted:
            # The first decides which port 0 stands for.
            where = (numeric, sockets[0].getsockname()[1] if sockets else port)
            sockets.append(socket.create_server(where, family=family, backlog=BACKLOG, dualstack_ipv6=everywhere))
    except OSError as error:
        for bound in sockets:
            bound.close()
        raise ListenError(_sentence(address, error)) from None
    return sockets


async def _resolve(address: str, host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(
            f"cannot listen on {address}: the host name does not resolve ({error.strerror}); "
            "set listen_address to an address of this host"
        ) from None
    return list(dict.fromkeys((family, str(where[0])) for family, _, _, _, where in found))


def _sentence(address: str, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"cannot listen on {address}: another program has this port; stop it or set listen_address to another port"
        case errno.EACCES:
            return f"cannot listen on {address}: not permitted; set listen_address to a port from 1024 on"
        case errno.EADDRNOTAVAIL:
            return f"cannot listen on {address}: this host has no such address; set listen_address to one it has, or to :PORT"
        case number:
            reason = os.strerror(number) if number is not None else str(error)
            return f"cannot listen on {address}: {reason}; set listen_address to an address of this host with a free port"
