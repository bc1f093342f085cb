"""The network on which the machines of a run reach each other, where a machine's own name does not give it.

Gloo gives other machines the address that this machine's name resolves to. In many images /etc/hosts makes that
the loopback's, so each machine would look for the others on itself. NCCL does not use the name.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

from engine.files import platforms

_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""


def name_is_usable() -> bool:
    """Returns whether other machines can connect to an address that this machine's name resolves to."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(not _is_loopback(str(address[0])) for *_, address in found)


def interface_towards(host: str, port: int) -> str | None:
    """Returns the interface by which this machine reaches a host; None where that is not known, or is the loopback's.

    Nothing is sent. Knows IPv4 on Linux.
    """
    if not platforms.IS_LINUX:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return None
        own = probe.getsockname()[0]
        if _is_loopback(own):
            return None
        return next((name for _, name in socket.if_nameindex() if _address(probe, name) == own), None)


def _address(probe: socket.socket, interface: str) -> str | None:
    try:
        answer = platforms.fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(answer[20:24])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
