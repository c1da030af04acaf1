"""Servers that take weights by a few requests and packed broadcasts: what `vllm` and `sglang` have in common.

The first rank of the trainer is rank 0 of a group with the servers' workers. It packs the tensors of a bucket into one
buffer and broadcasts that, while the server's request that receives it is under way.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, ClassVar, Protocol
from urllib.parse import urlencode, urlsplit

import torch
import torch.distributed as td
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ds_dynatrain.elastic.abort import WorldSockets
from ds_dynatrain.elastic.address import Address
from ds_dynatrain.errors import ConfigError, TransferError
from ds_dynatrain.weights.update import Outgoing, Receiver


class Broadcast(Protocol):
    """The trainer's end of a group with a server's workers."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> Any:
        """Send the tensor to all workers. src: 0, the trainer."""


LOOK_SECONDS = 0.01
"""Time between two looks for the first worker."""
Endpoint = Callable[[Mapping[str, Any]], Broadcast]
"""Makes a `Broadcast` from what the workers are told: `master_address`, `master_port`, `world_size` and more."""


class Requests:
    """JSON requests to one server. count: how many were made."""

    def __init__(self, url: str, timeout_seconds: float = 300.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no address of a server: give http://HOST:PORT")
        self.url, self.timeout_seconds, self.count, self._parts = url, timeout_seconds, 0, parts

    def ask(self, method: str, route: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """Return the answer to a request, None if it is empty. Raise TransferError unless the server says that it went
        well."""
        self.count += 1
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self.timeout_seconds)
        path = f"{self._parts.path.rstrip('/')}{route}{'?' + urlencode(query) if query else ''}"
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, HTTPException) as error:
            raise TransferError(
                f"{method} {self.url}{route}: no answer within {self.timeout_seconds:g} s: {error}"
            ) from error
        finally:
            connection.close()
        if answer.status != 200:
            raise TransferError(f"{method} {self.url}{route}: status {answer.status}: {text[:500]}")
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            return text

    def own_address(self) -> str:
        """Return this machine's address as the server's machine sees it."""
        family, _, _, _, place = socket.getaddrinfo(
            self._parts.hostname, self._parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # of UDP: sends nothing
            return str(probe.getsockname()[0])


class TorchEndpoint:
    """A group of torch's, made as `torch.distributed` makes one of that name, without its global state.

    gloo if `device` is the CPU, else the accelerator's library. info: see `Endpoint`; `group_name` and `backend` as
    SGLang has them. joining: the request that lets the workers join; what it fails with is raised.
    """

    def __init__(self, info: Mapping[str, Any], device: torch.device, seconds: float, joining: Future[Any]) -> None:
        from ds_dynatrain.adapters.groups.process_groups import join_programs  # receivers import this without DeepSpeed

        name, size = str(info.get("group_name", "weights")), int(info["world_size"])
        self._timeout, self._sockets = timedelta(seconds=seconds), WorldSockets()
        address, port = str(info["master_address"]), int(info["master_port"])
        self._store = TCPStore(address, port, size, is_master=True, wait_for_workers=False, timeout=self._timeout)
        while device.type == "cpu" and self._store.num_keys() == 0 and not joining.done():
            time.sleep(LOOK_SECONDS)  # gloo would wait for the workers also after the request has failed
        if joining.done():
            joining.result()
        with self._sockets.building():
            self._group = join_programs(PrefixStore(name, self._store), name, 0, size, device, seconds)

    def abort(self) -> None:
        """Make a waiting broadcast raise. This works for gloo, on Linux."""
        with suppress(OSError):
            self._sockets.abort()

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Broadcast, and wait for the end of it; raise TransferError if that fails."""
        try:
            options = td.BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = src, 0, self._timeout
            self._group.broadcast([tensor], options).wait(self._timeout)
        except RuntimeError as error:
            raise TransferError(
                f"broadcast of {tensor.nbytes} bytes to the server's workers failed: {error}"
            ) from error


def free_port() -> int:
    """Return a free TCP port."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def grouped(metadata: Sequence[Any], bucket_bytes: int) -> list[list[Any]]:
    """Return consecutive rows of the metadata in buckets: one is closed once it is larger than `bucket_bytes`."""
    found: list[list[Any]] = [[]]
    filled = 0
    for meta in metadata:
        if filled > bucket_bytes:
            found.append([])
            filled = 0
        found[-1].append(meta)
        filled += meta.nbytes
    return [bucket for bucket in found if bucket]


def meeting_place(master: str | None, own_address: Callable[[], str]) -> dict[str, Any]:
    """Return the address at which workers reach the trainer's rank 0: `master`, or its own address with a free port.

    master: HOST, HOST:PORT or [IPv6]:PORT.
    """
    if not master:
        return {"master_address": own_address(), "master_port": free_port()}
    has_port = ":" in master.rpartition("]")[2]
    place = Address.parse(master)
    return {"master_address": place.host, "master_port": place.port if has_port else free_port()}


class Server(Receiver):
    """Base class of receivers that are servers; `deliver` runs on the first rank."""

    always_claims: ClassVar[bool] = False
    _group: Broadcast | None = None

    def deliver(self, out: Outgoing) -> None:
        """Send one update; the server shows it if all tensors have passed, each as announced."""
        with ThreadPoolExecutor(1, "weights-request") as beside:
            try:
                self._deliver(out, out.full(), beside)
            except BaseException:  # before the request is awaited, which may itself wait for a broadcast
                group, self._group = self._group, None
                if isinstance(group, TorchEndpoint):
                    group.abort()
                raise

    def _deliver(self, out: Outgoing, tensors: Iterator[tuple[str, torch.Tensor]], beside: ThreadPoolExecutor) -> None:
        raise NotImplementedError


def packed(
    out: Outgoing, tensors: Iterator[tuple[str, torch.Tensor]], buckets: Sequence[Sequence[Any]], device: torch.device
) -> Iterator[tuple[Sequence[Any], torch.Tensor]]:
    """Yield each bucket with the bytes of its tensors, valid until the next one: of one tensor, or of a buffer."""
    sizes = [[meta.nbytes for meta in bucket] for bucket in buckets]
    room = torch.empty(max((sum(each) for each in sizes if len(each) > 1), default=0), dtype=torch.uint8, device=device)
    for bucket, nbytes in zip(buckets, sizes, strict=True):
        out.nbytes += sum(nbytes)
        if len(bucket) == 1:
            yield bucket, next(tensors)[1].detach().reshape(-1).view(torch.uint8).to(device)
            continue
        at = 0
        for size in nbytes:
            room[at : at + size].copy_(next(tensors)[1].detach().reshape(-1).view(torch.uint8))
            at += size
        yield bucket, room[:at]


def broadcast(group: Broadcast, data: torch.Tensor, request: Future[Any]) -> None:
    """Broadcast to the workers that a request lets receive. Raise what the request fails with, as soon as it does."""

    def give_up(ended: Future[Any]) -> None:
        if ended.exception() is not None and isinstance(group, TorchEndpoint):
            group.abort()

    request.add_done_callback(give_up)
    try:
        group.broadcast(data, 0)
    except TransferError as error:
        if request.done() and (cause := request.exception()) is not None:
            raise cause from error
        raise
