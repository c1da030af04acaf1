"""`SGLang`: an SGLang server, in a session of `begin_weight_update` and `end_weight_update`, one request per bucket.

The routes and fields are those of SGLang 0.5.23. Its `weights_checker` hashes tensors in the server's own form, which
this side cannot compute; replicas of one tensor rank must agree, and do not otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from ds_dynatrain.checkpoint.extents import name_of
from ds_dynatrain.errors import CertificateError, TransferError
from ds_dynatrain.weights.receivers.servers import (
    Broadcast,
    Requests,
    Server,
    TorchEndpoint,
    broadcast,
    grouped,
    meeting_place,
    packed,
)
from ds_dynatrain.weights.update import Outgoing

BUCKET_BYTES = 512 << 20
GROUP = "dynatrain_weights"


class SGLang(Server):
    """An SGLang server as a receiver; make one object on each rank of the trainer.

    url: http://HOST:PORT of the server. workers: its tensor ranks times its pipeline and data ranks. master: HOST or
    HOST:PORT of the trainer's rank 0, as the workers reach it; by default this machine's address and a free port.
    checks: whether to compare the checksums of replicas after each update. device: the group's device; NCCL on a
    GPU, gloo on a CPU.
    """

    def __init__(
        self,
        url: str,
        workers: int,
        *,
        master: str | None = None,
        checks: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_seconds: float = 300.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.server, self.workers, self._master, self._checks = Requests(url, timeout_seconds), workers, master, checks
        self.device, self.bucket_bytes = torch.device(device), bucket_bytes
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
        with suppress(TransferError):  # it may have none
            self._post("/destroy_weights_update_group", {"group_name": GROUP})
        info = {
            **meeting_place(self._master, self.server.own_address),
            "rank_offset": 1,
            "world_size": self.workers + 1,
            "group_name": GROUP,
            "backend": "gloo" if self.device.type == "cpu" else "nccl",
        }
        request = beside.submit(self._post, "/init_weights_update_group", info)
        found = TorchEndpoint(info, self.device, self.server.timeout_seconds, request)
        request.result()
        return found


def _compare(ranks: list[Any]) -> None:
    """Raise CertificateError if data ranks of the server that hold the same part have other checksums."""
    found = defaultdict[tuple[Any, ...], dict[str, Any]](dict)
    for rank in ranks:
        place = rank.get("parallelism_info", {})
        key = tuple(place.get(name) for name in ("role", "tp_rank", "pp_rank"))
        first = found[key] or rank
        found[key] = first
        if first.get("per_gpu_checksum") != rank.get("per_gpu_checksum"):
            names = [name for name, each in rank.get("checksums", {}).items() if first["checksums"].get(name) != each]
            raise CertificateError(f"replicas of {dict(place)} differ after the update, first in {names[:3]}")
