"""Servers that receive weights by a few requests and packed broadcasts: vLLM and SGLang.

The first rank of the trainer is rank 0 of a group with the servers' workers. It packs the tensors of a bucket into one
buffer and broadcasts the buffer, while a request to the server lets the workers receive it.

The routes and fields are those of vLLM 0.33, whose server runs with `VLLM_SERVER_DEV_MODE=1` and
`--weight-transfer-config '{"backend": "nccl"}'` (or `"sparse_nccl"`), and of SGLang 0.5.23. SGLang's `weights_checker`
hashes tensors in the server's own form, which cannot be computed here. Only the replicas of one tensor rank are
therefore compared.
"""

from __future__ import annotations

import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, ClassVar, Protocol
from urllib.parse import urlencode, urlsplit

import torch
import torch.distributed as td
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ds_dynatrain.checkpoint.extents import name_of
from ds_dynatrain.elastic.abort import WorldSockets
from ds_dynatrain.elastic.address import Address
from ds_dynatrain.errors import CertificateError, ConfigError, TransferError
from ds_dynatrain.weights.outputs import batches
from ds_dynatrain.weights.receivers.patches import patches
from ds_dynatrain.weights.update import Outgoing, Receiver


class Broadcast(Protocol):
    """The trainer's end of a process group with a server's workers."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> Any:
        """Broadcast the tensor to all workers.

        src: always 0, the trainer's rank.
        """


LOOK_SECONDS = 0.01
"""Seconds between two checks whether the first worker has connected."""
Endpoint = Callable[[Mapping[str, Any]], Broadcast]
"""A function that makes a `Broadcast` from the entries of the request that lets the workers join: `master_address`,
`master_port`, `world_size` and more."""


class Requests:
    """Client for JSON requests to one server.

    count: number of requests made so far.
    """

    def __init__(self, url: str, timeout_seconds: float = 300.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no address of a server: give http://HOST:PORT")
        self.url, self.timeout_seconds, self.count, self._parts = url, timeout_seconds, 0, parts

    def ask(self, method: str, route: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """Make a request and return the answer; None if the answer is empty. Raises TransferError unless the server
        reports success.
        """
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
        """Return the address of this machine from which packets to the server are sent."""
        family, _, _, _, place = socket.getaddrinfo(
            self._parts.hostname, self._parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # connecting a UDP socket sends nothing
            return str(probe.getsockname()[0])


class TorchEndpoint:
    """A torch process group, made the way `torch.distributed` makes one, but without its global state.

    It uses gloo if `device` is the CPU, otherwise the accelerator's library.

    info: see `Endpoint`; also `group_name` and `backend`, as in SGLang.
    joining: the request that lets the workers join. If it fails, its error is raised.
    """

    def __init__(self, info: Mapping[str, Any], device: torch.device, seconds: float, joining: Future[Any]) -> None:
        # imported here, because receivers import this file without DeepSpeed
        from ds_dynatrain.adapters.groups.process_groups import join_programs

        name, size = str(info.get("group_name", "weights")), int(info["world_size"])
        self._timeout, self._sockets = timedelta(seconds=seconds), WorldSockets()
        address, port = str(info["master_address"]), int(info["master_port"])
        self._store = TCPStore(address, port, size, is_master=True, wait_for_workers=False, timeout=self._timeout)
        while device.type == "cpu" and self._store.num_keys() == 0 and not joining.done():
            time.sleep(LOOK_SECONDS)  # gloo would continue to wait for the workers after the request has failed
        if joining.done():
            joining.result()
        with self._sockets.building():
            self._group = join_programs(PrefixStore(name, self._store), name, 0, size, device, seconds)

    def abort(self) -> None:
        """Make a waiting broadcast raise. Works for gloo on Linux."""
        with suppress(OSError):
            self._sockets.abort()

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Broadcast the tensor, and wait until it is sent. Raises TransferError if that fails."""
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
    """Divide consecutive tensors into buckets. A bucket ends with the tensor that makes it exceed `bucket_bytes`.

    metadata: the descriptions of the tensors.
    """
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
    """Return the address at which workers reach the trainer's rank 0, as entries of a request.

    master: HOST, HOST:PORT or [IPv6]:PORT. Without it, the result is this machine's own address and a free port.
    """
    if not master:
        return {"master_address": own_address(), "master_port": free_port()}
    has_port = ":" in master.rpartition("]")[2]
    place = Address.parse(master)
    return {"master_address": place.host, "master_port": place.port if has_port else free_port()}


class Server(Receiver):
    """Base class of receivers that are servers. `deliver` runs on the trainer's first rank."""

    always_claims: ClassVar[bool] = False
    _group: Broadcast | None = None
    _endpoint: Endpoint | None = None

    def __init__(
        self, device: torch.device | str, bucket_bytes: int, master: str | None, timeout_seconds: float
    ) -> None:
        self.device, self.bucket_bytes = torch.device(device), bucket_bytes
        self._master, self._timeout_seconds = master, timeout_seconds

    def deliver(self, out: Outgoing) -> None:
        """Send one update. The server uses the new weights if all tensors have arrived as announced."""
        with ThreadPoolExecutor(1, "weights-request") as beside:
            try:
                self._deliver(out, out.full(), beside)
            # abort first: the request, which is awaited next, may itself be waiting for a broadcast
            except BaseException:
                group, self._group = self._group, None
                if isinstance(group, TorchEndpoint):
                    group.abort()
                raise

    def _deliver(self, out: Outgoing, tensors: Iterator[tuple[str, torch.Tensor]], beside: ThreadPoolExecutor) -> None:
        raise NotImplementedError

    def _joined(
        self,
        beside: ThreadPoolExecutor,
        join: Callable[[dict[str, Any]], Any],
        own_address: Callable[[], str],
        workers: int,
        **more: Any,
    ) -> Broadcast:
        """Return the trainer's end of a new process group with the server's workers.

        beside: a thread, in which `join` is called.
        join: function that makes the request which lets the workers join the group.
        own_address: function that returns this machine's address.
        workers: number of the workers.
        more: further entries of the request.
        """
        info = {**meeting_place(self._master, own_address), "rank_offset": 1, "world_size": workers + 1, **more}
        request = beside.submit(join, info)
        if self._endpoint is None:
            found: Broadcast = TorchEndpoint(info, self.device, self._timeout_seconds, request)
        else:
            found = self._endpoint(info)
        request.result()
        return found


def packed(
    out: Outgoing, tensors: Iterator[tuple[str, torch.Tensor]], buckets: Sequence[Sequence[Any]], device: torch.device
) -> Iterator[tuple[Sequence[Any], torch.Tensor]]:
    """Yield (bucket, its tensors as bytes). The bytes are valid until the next pair is requested.

    A bucket with one tensor is not copied; the tensors of other buckets are packed into one buffer.
    """
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
    """Broadcast data to workers that receive it during a request. If the request fails, raise its error at once."""

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


# ---- vLLM ------------------------------------------------------------------------------------------------------------

BUCKET_BYTES_OF_VLLM, BUCKET_BYTES_OF_SGLANG = 32 << 20, 512 << 20
BUFFERS = 2
"""Number of buffers into which a worker receives. The workers are told this number."""


class VLLMClient(Requests):
    """vLLM's weight-sync client over HTTP. `VLLM` takes any object with these methods, such as vLLM's Ray client."""

    def get_world_size(self) -> int:
        """Return the number of workers."""
        return int(self.ask("GET", "/get_world_size")["world_size"])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join the trainer's group."""
        self.ask("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Prepare the workers for weights in the checkpoint's format."""
        self.ask("POST", "/start_weight_update", {"is_checkpoint_format": True})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive weights, and return once they have."""
        self.ask("POST", "/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make the received weights the current ones."""
        self.ask("POST", "/finish_weight_update", {"weight_version": weight_version})

    def shutdown_weight_transfer_engine(self) -> None:
        """Make the server's workers leave the process group that they share with the trainer."""
        self.ask("POST", "/shutdown_weight_transfer_engine")

    def get_weight_version(self) -> str | None:
        """Return the version of the server's weights; None if no update has set one."""
        found: str | None = self.ask("GET", "/weight_info")["weight_version"]
        return found

    def pause(self, mode: str) -> None:
        """Pause generation, in one of vLLM's modes."""
        self.ask("POST", "/pause", mode=mode)

    def resume(self) -> None:
        """Continue generation after a pause."""
        self.ask("POST", "/resume")


class VLLM(Server):
    """A vLLM server as a receiver. Make one object on each rank of the trainer.

    client: the server's URL, or an object with the methods of `VLLMClient`.
    workers: the number of workers; by default, the server is asked.
    master: HOST or HOST:PORT of the trainer's rank 0, as the workers reach it; by default this machine's address and a
        free port.
    endpoint: function that makes the trainer's end of the group; by default `nccl_of_vllm` on a GPU, which needs vLLM
        installed here, and torch's gloo on a CPU.
    pause: how generation is paused during an update ("keep", "wait" or "abort"); None if the caller pauses it.

    After an update that fails half-way, generation stays paused until another update succeeds.
    """

    def __init__(
        self,
        client: Any,
        *,
        workers: int | None = None,
        master: str | None = None,
        endpoint: Endpoint | None = None,
        sparse: bool = False,
        pause: str | None = "keep",
        bucket_bytes: int = BUCKET_BYTES_OF_VLLM,
        timeout_seconds: float = 300.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.client = VLLMClient(client, timeout_seconds) if isinstance(client, str) else client
        super().__init__(device, bucket_bytes, master, timeout_seconds)
        self._pause, self._workers = pause, workers
        self.has_deltas, self._held, self._label = sparse, dict[str, torch.Tensor](), ""
        self._endpoint = endpoint or (None if self.device.type == "cpu" else nccl_of_vllm)

    def _deliver(self, out: Outgoing, tensors: Iterator[tuple[str, torch.Tensor]], beside: ThreadPoolExecutor) -> None:
        before, metadata = getattr(self.client, "count", 0), out.source.metadata
        try:
            if self._pause is not None:
                self.client.pause(self._pause)
            if self._group is None:
                self._group = self._connected(beside)
        except Exception:
            if self._pause is not None:  # no weight has been changed yet
                with suppress(Exception):
                    self.client.resume()
            raise
        self.client.start_weight_update()
        if self.has_deltas:
            self._send_patches(self._group, out, tensors, beside)
        else:
            info = {
                "names": [meta.name for meta in metadata],
                "dtype_names": [name_of(meta.dtype) for meta in metadata],
                "shapes": [list(meta.shape) for meta in metadata],
            }
            request = beside.submit(self.client.update_weights, info)
            for _, data in packed(out, tensors, grouped(metadata, self.bucket_bytes), self.device):
                broadcast(self._group, data, request)
            request.result()
        out.check_whole()
        self.client.finish_weight_update(out.label)
        self._label = out.label
        if self._pause is not None:
            self.client.resume()
        out.rpcs = getattr(self.client, "count", 0) - before

    def _send_patches(
        self, group: Broadcast, out: Outgoing, tensors: Iterator[tuple[str, torch.Tensor]], beside: ThreadPoolExecutor
    ) -> None:
        """Send the elements that changed since the last update, in one request per `bucket_bytes`.

        All elements are sent if the caller wants no delta, or if the server does not have the last update's version.
        """
        held, label = self._held, self._label
        self._held, self._label = {}, ""  # what a failed update leaves behind is not known
        out.is_delta = out.wants_delta and bool(held) and self.client.get_weight_version() == label
        if not out.is_delta:
            held = {}
        for chunk in batches(patches(tensors, held, self.device), lambda patch: patch.nbytes, self.bucket_bytes):
            info = {
                "names": [patch.name for patch in chunk],
                "dtype_names": [name_of(patch.values.dtype) for patch in chunk],
                "shapes": [list(patch.full_shape) for patch in chunk],
                "num_updates_list": [len(patch.indices) for patch in chunk],
            }
            request = beside.submit(self.client.update_weights, info)
            for patch in chunk:
                broadcast(group, patch.indices, request)
                broadcast(group, patch.values, request)
                out.nbytes += patch.nbytes
            request.result()
        self._held = held

    def _connected(self, beside: ThreadPoolExecutor) -> Broadcast:
        """Return the trainer's end of a new process group with the server's workers."""
        # fails if the workers are in no group; before vLLM 0.33 a new group replaces the old one
        with suppress(Exception):
            self.client.shutdown_weight_transfer_engine()
        return self._joined(
            beside,
            self.client.init_weight_transfer_engine,
            lambda: str(self.client.own_address()),
            self._workers or self.client.get_world_size(),
            packed=not self.has_deltas,
            packed_buffer_size_bytes=self.bucket_bytes,
            packed_num_buffers=BUFFERS,
        )


def nccl_of_vllm(info: Any) -> Broadcast:
    """Return the trainer's end of the NCCL group with vLLM's workers, made by vLLM's own code."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init  # type: ignore[import-not-found]

    found: Broadcast = trainer_init(dict(info))
    return found


# ---- SGLang ----------------------------------------------------------------------------------------------------------

GROUP = "dynatrain_weights"


class SGLang(Server):
    """An SGLang server as a receiver. Make one object on each rank of the trainer.

    url: http://HOST:PORT of the server.
    workers: the number of its tensor ranks times its pipeline and data ranks.
    master: HOST or HOST:PORT of the trainer's rank 0, as the workers reach it; by default this machine's address and a
        free port.
    checks: whether to compare the checksums of replicas after each update.
    device: the group's device: NCCL is used on a GPU, gloo on a CPU.
    """

    def __init__(
        self,
        url: str,
        workers: int,
        *,
        master: str | None = None,
        checks: bool = True,
        bucket_bytes: int = BUCKET_BYTES_OF_SGLANG,
        timeout_seconds: float = 300.0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(device, bucket_bytes, master, timeout_seconds)
        self.server, self.workers, self._checks = Requests(url, timeout_seconds), workers, checks
        self.checksums: list[Any] = []
        """Checksums that the server's ranks reported after the last update."""

    def _deliver(self, out: Outgoing, tensors: Iterator[tuple[str, torch.Tensor]], beside: ThreadPoolExecutor) -> None:
        before = self.server.count
        if self._group is None:
            self._group = self._connected(beside)
        self._post("/begin_weight_update", {"selector": "all"})
        buckets = grouped(out.source.metadata, self.bucket_bytes)
        for bucket, data in packed(out, tensors, buckets, self.device):
            body = {
                "names": [meta.name for meta in bucket],
                "dtypes": [name_of(meta.dtype) for meta in bucket],
                "shapes": [list(meta.shape) for meta in bucket],
                "group_name": GROUP,
                "load_format": "flattened_bucket",
                "flush_cache": bucket is buckets[-1],
                "weight_version": out.label if bucket is buckets[-1] else None,
            }
            request = beside.submit(self._post, "/update_weights_from_distributed", body)
            broadcast(self._group, data, request)
            request.result()
        out.check_whole()
        self._post("/end_weight_update", {})
        if self._checks:
            answer = self._post("/weights_checker", {"action": "checksum"})
            self.checksums = list(answer.get("ranks") or ())
            _compare(self.checksums)
        out.rpcs = self.server.count - before

    def _post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.server.ask("POST", route, body) or {}
        if not answer.get("success", True):
            raise TransferError(f"{self.server.url}{route}: {answer.get('message')}")
        return answer

    def _connected(self, beside: ThreadPoolExecutor) -> Broadcast:
        with suppress(TransferError):  # the server may have no group yet
            self._post("/destroy_weights_update_group", {"group_name": GROUP})
        backend = "gloo" if self.device.type == "cpu" else "nccl"
        join = partial(self._post, "/init_weights_update_group")
        return self._joined(beside, join, self.server.own_address, self.workers, group_name=GROUP, backend=backend)


def _compare(ranks: list[Any]) -> None:
    """Raise CertificateError if data ranks of the server that hold the same part have different checksums."""
    found = defaultdict[tuple[Any, ...], dict[str, Any]](dict)
    for rank in ranks:
        place = rank.get("parallelism_info", {})
        key = tuple(place.get(name) for name in ("role", "tp_rank", "pp_rank"))
        first = found[key] or rank
        found[key] = first
        if first.get("per_gpu_checksum") != rank.get("per_gpu_checksum"):
            names = [name for name, each in rank.get("checksums", {}).items() if first["checksums"].get(name) != each]
            raise CertificateError(f"replicas of {dict(place)} differ after the update, first in {names[:3]}")
