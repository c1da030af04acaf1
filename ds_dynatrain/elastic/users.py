"""Which user of this machine holds the other end of a TCP connection: the kernel says it, in one message.

It is sock_diag(7). /proc/net/tcp has the same, but takes many milliseconds to read, and misses lines of sockets that
come and go meanwhile.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from typing import Any

from ds_dynatrain.errors import PeerRefused

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, NLMSG_ERROR = 4, 20, 1, 2
HEADER = struct.Struct("=IHHII")
"""`struct nlmsghdr`: length, type, flags, number, process."""
QUESTION = struct.Struct("=BBBxI")
"""Head of `struct inet_diag_req_v2`: family, protocol, what else to tell, states."""
ENDS = struct.Struct(">HH16s16s4x8s")
"""`struct inet_diag_sockid`: both ports, both addresses, any device, any cookie."""
ANSWER = struct.Struct("=4x48x12xII")
"""`struct inet_diag_msg`: the user and the inode."""
ANSWER_BYTES = 4096
SECONDS = 1.0
ROOT = 0

Place = tuple[Any, ...]
"""What a socket calls an address: the host, the port, and more for IPv6."""


def check_user(there: Place, here: Place) -> None:
    """PeerRefused if whoever is connected to `here` from `there`, on this machine, is of another user and not root;
    ConnectionError if it has gone already."""
    user = connected_user(there, here)
    if user is None:
        raise ConnectionError("it has gone already")
    if user not in (os.geteuid(), ROOT):
        raise PeerRefused(
            f"it is of user {user} and the coordinator of user {os.geteuid()}, and without a token only processes of "
            "one user make up a job; name the same token file on both sides in DYNATRAIN_TOKEN_FILE"
        )


def connected_user(there: Place, here: Place) -> int | None:
    """The user id of whoever holds the socket at `there` that is connected to `here`.

    None if nobody does any more: a socket that is closed belongs to nobody, and the kernel says root. OSError if the
    kernel does not answer.
    """
    found = _asked(there, here)
    if found is None:
        return None
    user, inode = found
    return user if inode else None


def tells_users(listening: Place) -> bool:
    """Whether this kernel answers such questions; asked about a socket that listens here."""
    any_host = "::" if ":" in listening[0] else "0.0.0.0"
    try:
        return _asked(listening, (any_host, 0)) is not None
    except OSError:
        return False


def _asked(one: Place, other: Place) -> tuple[int, int] | None:
    """(user, inode) of the socket at `one` whose other end is `other`; None if there is none."""
    hosts = [ipaddress.ip_address(place[0]).packed for place in (one, other)]
    family = socket.AF_INET if len(hosts[0]) == 4 else socket.AF_INET6
    ends = ENDS.pack(one[1], other[1], *hosts, b"\xff" * 8)
    question = QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + ends
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(SECONDS)
        kernel.send(HEADER.pack(HEADER.size + len(question), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + question)
        answer = kernel.recv(ANSWER_BYTES)
    if HEADER.unpack_from(answer)[1] != NLMSG_ERROR:
        user, inode = ANSWER.unpack_from(answer, HEADER.size)
        return user, inode
    (number,) = struct.unpack_from("=i", answer, HEADER.size)
    if number == -errno.ENOENT:
        return None
    raise OSError(-number, os.strerror(-number))
