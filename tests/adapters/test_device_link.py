"""A link over a library that is not there: the order of calls, and how waits end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_dynatrain.adapters.groups import communicators
from ds_dynatrain.adapters.groups.communicators import Communicator, CommunicatorLink
from ds_dynatrain.errors import MemberMissing, TransferError

DEVICE = torch.device("xpu", 0)
MEMBERS = (3, 5, 8)


class Library:
    """A group whose calls are written down, and its back-end."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.aborted = threading.Event()

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append(("begin", device))

    def _end_coalescing(self, device: torch.device) -> Any:
        self.calls.append(("end", device))
        return self

    def wait(self) -> None:
        self.calls.append(("wait",))

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(("send", tensors[0].numel(), rank, tag))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(("recv", tensors[0].numel(), rank, tag))

    def abort(self) -> None:
        self.calls.append(("abort",))
        self.aborted.set()


def link_over(
    library: Library, monkeypatch: pytest.MonkeyPatch, stop: Callable[[], None] = lambda: None
) -> CommunicatorLink:
    backend: Any = library
    monkeypatch.setattr(Communicator, "serve", lambda self, group: None)
    link = CommunicatorLink(Communicator(DEVICE, communicators.Kind.CUSTOM, backend), 5, MEMBERS, stop)
    monkeypatch.setattr(link, "_group", library)
    return link


def test_messages_of_a_batch_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the members' places in the communicator; what is received is asked for first."""
    library = Library()
    link = link_over(library, monkeypatch)
    link.exchange([(torch.empty(4), 8), (torch.empty(2), 3)], [(torch.empty(6), 3)])
    assert library.calls == [
        ("begin", DEVICE),
        ("recv", 6, 0, 0),
        ("send", 4, 2, 0),
        ("send", 2, 0, 0),
        ("end", DEVICE),
        ("wait",),
    ]


def test_work_is_done_once_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    library, done = Library(), list[str]()
    link_over(library, monkeypatch).run(lambda: done.append(threading.current_thread().name), later(), "it", [3])
    assert done == ["dynatrain-moves"] and not library.calls


def test_a_peer_that_does_not_send_is_named_and_the_device_is_free(
    monkeypatch: pytest.MonkeyPatch, in_time: Callable[[float, float], None]
) -> None:
    library, begin = Library(), time.monotonic()
    with pytest.raises(MemberMissing) as caught:
        link_over(library, monkeypatch).run(library.aborted.wait, later(0.1), "2 batches", [3, 8])
    assert caught.value.members == (3, 8) and library.calls == [("abort",)]
    in_time(time.monotonic() - begin, 1.0)


def test_who_is_told_to_stop_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()

    def stop() -> None:
        raise TransferError("another member has failed")

    with pytest.raises(TransferError, match="another member has failed"):
        link_over(library, monkeypatch, stop).run(library.aborted.wait, later(), "it", [3])
    assert library.calls == [("abort",)]


def test_what_fails_is_an_error_and_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()

    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(TransferError, match=r"it with members \[3\] failed: out of memory"):
        link_over(library, monkeypatch).run(fail, later(), "it", [3])
    assert library.calls == [("abort",)]


def test_an_abort_that_looks_well_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where members come and go: another thread hears of a death, and aborts."""
    library = Library()
    link = link_over(library, monkeypatch)

    def aborted_meanwhile() -> None:
        communicators.end([link.communicator], is_broken=True)

    with pytest.raises(TransferError, match="the communicator was aborted"):
        link.run(aborted_meanwhile, later(), "it", [3])
    assert library.calls == [("abort",)], "once"


@pytest.mark.parametrize(("name", "expected"), [("nccl", True), ("xccl", False), ("hccl", False)])
def test_libraries_that_are_known_for_it(monkeypatch: pytest.MonkeyPatch, name: str, expected: bool) -> None:
    monkeypatch.setattr(communicators, "is_accelerated", lambda: True)
    monkeypatch.setattr(communicators, "device_backend", lambda: name)
    assert communicators.can_send_between_devices() is expected


def later(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds
