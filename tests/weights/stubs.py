"""Servers that speak the routes of vLLM 0.33 and SGLang 0.5.23, with one worker that joins the trainer's group by gloo.

Fields and order of calls are checked as the real ones do; a request that is not one of theirs is answered by 400.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as td
from torch.distributed import distributed_c10d as c10d

SECONDS = 20.0


class Stub:
    """What both have in common: a server thread, a log of requests, a worker's weights and its group."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.version: str | None = None
        self.versions: list[str | None] = []
        self.fails_at = ""
        """A route whose next request is answered by 500."""
        self._group: Any = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, route: str, body: Mapping[str, Any], query: Mapping[str, str]) -> Any:
        """What the server says to a request; ValueError for one that it refuses."""
        raise NotImplementedError

    @contextmanager
    def serving(self) -> Iterator[Any]:
        """Serve inside the block."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def join(self, info: Mapping[str, Any]) -> Any:
        """The worker's end of the trainer's group, made by torch as `init_process_group` makes one of a name."""
        name, rank = str(info.get("group_name", "weights")), int(info["rank_offset"])
        address = str(info["master_address"]), int(info["master_port"])
        wait = timedelta(seconds=SECONDS)
        store = td.TCPStore(*address, int(info["world_size"]), is_master=False, timeout=wait, wait_for_workers=False)  # type: ignore[attr-defined]
        prefix = c10d.PrefixStore("cpu/", c10d.PrefixStore(f"{name}/", c10d.PrefixStore(name, store)))
        return td.ProcessGroupGloo(prefix, rank, int(info["world_size"]), timeout=wait)

    def receive(self, rows: list[tuple[str, str, list[int]]]) -> None:
        """Take one packed broadcast, and load the tensors."""
        sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in rows]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        self._group.broadcast([data], td.BroadcastOptions()).wait(timedelta(seconds=SECONDS))
        for (name, dtype, shape), part in zip(rows, data.split(sizes), strict=True):
            self.weights[name] = part.clone().view(getattr(torch, dtype)).view(shape)

    def _handler(stub) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - `self` is the handler's
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                parts = urlsplit(self.path)
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                stub.requests.append(parts.path)
                status, answer = 200, dict[str, Any]()
                try:
                    if parts.path == stub.fails_at:
                        stub.fails_at, status, answer = "", 500, {"error": "out of memory"}
                    else:
                        answer = stub.answer(parts.path, json.loads(data or b"{}"), dict(parse_qsl(parts.query)))
                except (ValueError, KeyError, RuntimeError) as error:
                    status, answer = 400, {"success": False, "message": repr(error)}
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        return Handler


class VLLMStub(Stub):
    """vLLM's: init, start, update, finish; the workers load what they receive at once."""

    phase = "new"
    paused = False
    is_sparse = False
    """Whether its backend is `sparse_nccl`."""
    answers_version: list[str] = []  # noqa: RUF012 - set on the object
    """What it says of its version in turn, in place of the truth."""
    patched = 0
    """Elements that patches have set."""

    def patch(self, name: str, dtype: str, shape: list[int], count: int) -> None:
        """Receive one sparse patch, check it as vLLM's `load_checkpoint_weight_patches` does, and apply it."""
        indices, values = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=getattr(torch, dtype))
        for each in (indices, values):
            self._group.broadcast([each.view(torch.uint8)], td.BroadcastOptions()).wait(timedelta(seconds=SECONDS))
        numel = math.prod(shape)
        self._need(not values.isnan().any() and len(indices.unique()) == count)
        self._need(count == 0 or (int(indices.min()) >= 0 and int(indices.max()) < numel))
        held = self.weights.setdefault(name, torch.full(shape, torch.nan, dtype=getattr(torch, dtype)))
        held.view(-1)[indices.long()] = values
        self.patched += count

    def answer(self, route: str, body: Mapping[str, Any], query: Mapping[str, str]) -> Any:
        if route == "/get_world_size":
            return {"world_size": 1}
        if route == "/weight_info":
            return {"weight_version": self.answers_version.pop(0) if self.answers_version else self.version}
        if route in ("/pause", "/resume"):
            self.paused = route == "/pause"
            self._need(not self.paused or query["mode"] in ("keep", "wait", "abort"))
        elif route == "/init_weight_transfer_engine":
            self.info = body["init_info"]
            self._need(self.info["packed"] is not self.is_sparse and self.info["packed_num_buffers"] > 0)
            self._group, self.phase = self.join(self.info), "ready"
        elif route == "/shutdown_weight_transfer_engine":
            self._group, self.phase = None, "new"
        elif route == "/start_weight_update":
            self._need(self.phase == "ready" and body["is_checkpoint_format"])
            self.phase = "updating"
        elif route == "/update_weights":
            self._need(self.phase == "updating")
            info = body["update_info"]
            rows = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
            if self.is_sparse:
                for row, count in zip(rows, info["num_updates_list"], strict=True):
                    self.patch(*row, count)
                rows = []
            while rows:
                taken, filled = 0, 0
                while taken < len(rows) and filled <= self.info["packed_buffer_size_bytes"]:
                    filled += math.prod(rows[taken][2]) * getattr(torch, rows[taken][1]).itemsize
                    taken += 1
                self.receive(rows[:taken])
                rows = rows[taken:]
        elif route == "/finish_weight_update":
            self._need(self.phase == "updating")
            self.phase, self.version = "ready", body["weight_version"]
            self.versions.append(self.version)
        else:
            raise ValueError(route)
        return {}

    @staticmethod
    def _need(is_so: bool) -> None:
        if not is_so:
            raise ValueError("not now, or not so")


class SGLangStub(Stub):
    """SGLang's: a session, one request per bucket."""

    is_open = False

    def answer(self, route: str, body: Mapping[str, Any], query: Mapping[str, str]) -> Any:
        if route == "/init_weights_update_group":
            self._group = self.join(body)
        elif route == "/destroy_weights_update_group":
            self._group = None
        elif route == "/begin_weight_update":
            self.is_open = True
        elif route == "/update_weights_from_distributed":
            if not self.is_open or body["load_format"] != "flattened_bucket":
                raise ValueError(route)
            self.receive(list(zip(body["names"], body["dtypes"], body["shapes"], strict=True)))
            if body["weight_version"] is not None:
                self.versions.append(body["weight_version"])
        elif route == "/end_weight_update":
            self.is_open = False
        elif route == "/weights_checker":
            place = {"role": "target", "tp_rank": 0, "pp_rank": 0}
            sums = {name: str(held.float().sum()) for name, held in self.weights.items()}
            rank = {"checksums": sums, "per_gpu_checksum": str(sums), "parallelism_info": place}
            return {"success": True, "message": "", "ranks": [rank, {**rank, **self.other_replica}]}
        else:
            raise ValueError(route)
        return {"success": True, "message": ""}

    other_replica: Mapping[str, Any] = {}
    """What the second data rank says otherwise."""
