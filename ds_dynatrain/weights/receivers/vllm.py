"""`VLLM`: a vLLM server, or several, in its four phases: init, start, update, finish, with a weight version.

The routes and fields are those of vLLM 0.33; the server runs with `VLLM_SERVER_DEV_MODE=1` and
`--weight-transfer-config '{"backend": "nccl"}'`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from ds_dynatrain.checkpoint.extents import name_of
from ds_dynatrain.weights.receivers.servers import (
    Broadcast,
    Endpoint,
    Requests,
    Server,
    TorchEndpoint,
    broadcast,
    grouped,
    meeting_place,
    packed,
)
from ds_dynatrain.weights.update import Outgoing

BUCKET_BYTES = 32 << 20
BUFFERS = 2
"""Number of buffers into which a worker receives. Workers are told this number."""


class VLLMClient(Requests):
    """vLLM's weight-sync client over HTTP; `VLLM` takes any object with these methods, such as vLLM's Ray client."""

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
        """Let the workers receive; returns once they have."""
        self.ask("POST", "/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make the weights the present ones."""
        self.ask("POST", "/finish_weight_update", {"weight_version": weight_version})

    def shutdown_weight_transfer_engine(self) -> None:
        """Let the workers leave the trainer's group."""
        self.ask("POST", "/shutdown_weight_transfer_engine")

    def pause(self, mode: str) -> None:
        """Pause generation, in one of vLLM's modes."""
        self.ask("POST", "/pause", mode=mode)

    def resume(self) -> None:
        """Continue generation after a pause."""
        self.ask("POST", "/resume")


class VLLM(Server):
    """A vLLM server as a receiver; make one object on each rank of the trainer.

    client: the server's URL, or an object with the methods of `VLLMClient`. workers: how many
    workers there are; the server is asked by default. master: HOST or HOST:PORT of the trainer's
    rank 0, as the workers reach it; by default this machine's address and a free port. endpoint: makes the trainer's
    end of the group; by default `nccl_of_vllm` on a GPU, which needs vLLM installed here, and torch's gloo on a CPU.
    pause: how generation is paused meanwhile ("keep", "wait" or "abort"); None if it is paused by other means. After an
    update that failed once it had started, generation stays paused until another one succeeds.
    """

    def __init__(
        self,
        client: Any,
        *,
        workers: int | None = None,
        master: str | None = None,
        endpoint: Endpoint | None = None,
        pause: str | None = "keep",
        bucket_bytes: int = BUCKET_BYTES,
        timeout_seconds: float = 300.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.client = VLLMClient(client, timeout_seconds) if isinstance(client, str) else client
        self.device, self.bucket_bytes, self._pause, self._master = torch.device(device), bucket_bytes, pause, master
        self._workers, self._timeout_seconds = workers, timeout_seconds
        self._endpoint = endpoint or (None if self.device.type == "cpu" else nccl_of_vllm)

    def _deliver(self, out: Outgoing, tensors: Iterator[tuple[str, torch.Tensor]], beside: ThreadPoolExecutor) -> None:
        before = getattr(self.client, "count", 0)
        try:
            if self._pause is not None:
                self.client.pause(self._pause)
            if self._group is None:
                self._group = self._connected(beside)
        except Exception:
            if self._pause is not None:  # no weight was touched
                with suppress(Exception):
                    self.client.resume()
            raise
        self.client.start_weight_update()
        metadata = out.source.metadata
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
        if self._pause is not None:
            self.client.resume()
        out.rpcs = getattr(self.client, "count", 0) - before

    def _connected(self, beside: ThreadPoolExecutor) -> Broadcast:
        """Return the trainer's end of a new group."""
        with suppress(Exception):  # the workers may be in no group; before vLLM 0.33 a new group replaces the old one
            self.client.shutdown_weight_transfer_engine()
        info = {
            **meeting_place(self._master, lambda: str(self.client.own_address())),
            "rank_offset": 1,
            "world_size": (self._workers or self.client.get_world_size()) + 1,
            "packed": True,
            "packed_buffer_size_bytes": self.bucket_bytes,
            "packed_num_buffers": BUFFERS,
        }
        request = beside.submit(self.client.init_weight_transfer_engine, info)
        if self._endpoint is None:
            found: Broadcast = TorchEndpoint(info, self.device, self._timeout_seconds, request)
        else:
            found = self._endpoint(info)
        request.result()
        return found


def nccl_of_vllm(info: Any) -> Broadcast:
    """Return the trainer's end of the group that vLLM's workers make, by vLLM's own code."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init  # type: ignore[import-not-found]

    found: Broadcast = trainer_init(dict(info))
    return found
