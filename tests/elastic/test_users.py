"""Whose process is at the other end of a connection on this machine."""

from __future__ import annotations

import os
import socket

import pytest

from ds_dynatrain.elastic.users import connected_user, tells_users


@pytest.mark.parametrize(
    ("listens", "connects"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "::ffff:127.0.0.1"), ("::1", "::1")]
)
def test_whose_connection_it_is(listens: str, connects: str) -> None:
    def family(host: str) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in host else socket.AF_INET

    with socket.socket(family(listens), socket.SOCK_STREAM) as listener:
        try:
            listener.bind((listens, 0))
        except OSError:
            pytest.skip(f"this machine has no {listens}")
        listener.listen()
        assert tells_users(listener.getsockname())
        with socket.socket(family(connects), socket.SOCK_STREAM) as peer:
            peer.connect((connects, listener.getsockname()[1]))
            link, _ = listener.accept()
            there, here = link.getpeername(), link.getsockname()
            assert connected_user(there, here) == os.geteuid()
            assert connected_user(there, (here[0], 1)) is None
        assert connected_user(there, here) is None, "nobody holds the other end any more"
        link.close()
