"""Updates of servers by their own routes (stubs), of folders, and by the objects that TRL and verl take."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as td

from ds_dynatrain.elastic.address import DEFAULT_PORT
from ds_dynatrain.errors import (
    CertificateError,
    CheckpointDamaged,
    ConfigError,
    TransferError,
    UnsupportedError,
    WeightsError,
    WorldChanged,
)
from ds_dynatrain.weights.receivers import servers, trl, verl
from ds_dynatrain.weights.receivers import version_folders as folder
from ds_dynatrain.weights.update import Receiver, Update, send
from tests.engine import subjects
from tests.engine.pool import RankPool
from tests.engine.transitions import layout
from tests.weights import cases, fakes, stubs
from tests.weights.test_group import equal

Make = Callable[[str], Receiver]
NEW_GROUP = ["/shutdown_weight_transfer_engine", "/get_world_size", "/init_weight_transfer_engine"]
PHASES = ["/start_weight_update", "/update_weights", "/finish_weight_update"]


def to_vllm(url: str) -> Receiver:
    return servers.VLLM(url, pause=None, bucket_bytes=600, timeout_seconds=20)


def to_vllm_paused(url: str) -> Receiver:
    return servers.VLLM(url, bucket_bytes=600, timeout_seconds=20)


def to_vllm_sparse(url: str) -> Receiver:
    return servers.VLLM(url, sparse=True, pause=None, bucket_bytes=600, timeout_seconds=20)


def to_sglang(url: str) -> Receiver:
    return servers.SGLang(url, 1, bucket_bytes=600, timeout_seconds=20)


def to_folder(path: str) -> Receiver:
    return folder.Folder(path, max_shard_bytes=600)


def updates(make: Make, at: str, steps: list[int], version: str | None = None, delta: bool = False) -> list[Any]:
    """An update of each step by one object; what was raised in place of those that failed."""
    receiver, found = make(at), list[Any]()
    for step in steps:
        try:
            found.append(send(fakes.fake_source(step), receiver, version=version, delta=delta))
        except (TransferError, CertificateError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def with_nan(at: str) -> tuple[str, Update]:
    """What was raised for weights with NaN, and the update of other weights after it."""
    receiver, source = to_vllm_sparse(at), fakes.fake_source(1)
    source.weights["words"][0, 0] = torch.nan
    with pytest.raises(TransferError) as failed:
        send(source, receiver, delta=True)
    return str(failed.value), send(fakes.fake_source(2), receiver, delta=True)


def on_a_walk(make: Make, at: str, find: cases.Find, path: list[Any]) -> list[tuple[Update, cases.Named]]:
    receiver = make(at)
    return cases.at_each(
        find, "bf16", path, lambda engine, subject: (send(engine, receiver), cases.expected(engine, subject))
    )


def test_vllm_in_four_phases(pool: RankPool) -> None:
    with stubs.VLLMStub().serving() as stub:
        records = pool.run(updates, make=to_vllm, at=stub.url, steps=[1, 2])[0]
        assert stub.requests == [*NEW_GROUP, *PHASES, *PHASES]
        assert equal(stub.weights, fakes.values(2)) and stub.versions == ["1", "2"]
        assert [each.rpcs for each in records] == [6, 3]
        stub.requests.clear()
        pool.run(updates, make=to_vllm_paused, at=stub.url, steps=[3], version="step 3")
        assert [stub.requests[0], stub.requests[-1]] == ["/pause", "/resume"] and not stub.paused
        assert equal(stub.weights, fakes.values(3)) and stub.version == "step 3"


def test_vllm_that_fails_is_not_told_to_finish(pool: RankPool) -> None:
    with stubs.VLLMStub().serving() as stub:
        stub.fails_at = "/update_weights"
        for rank, found in enumerate(pool.run(updates, make=to_vllm, at=stub.url, steps=[1, 2])):
            assert ("out of memory" if rank == 0 else "1 of 4 ranks could not send version 1") in found[0]
            assert found[1].version == 2
        assert stub.versions == ["2"] and stub.requests.count("/init_weight_transfer_engine") == 2
        assert "/shutdown_weight_transfer_engine" in stub.requests
        assert equal(stub.weights, fakes.values(2))


def changed(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
    return sum(int((one[name] != other[name]).sum()) for name in one)


def test_vllm_takes_changed_elements(pool: RankPool) -> None:
    with stubs.VLLMStub().serving() as stub:
        stub.is_sparse, all_elements = True, sum(each.numel() for each in fakes.values(1).values())
        found = pool.run(updates, make=to_vllm_sparse, at=stub.url, steps=[1, 2, 2], delta=True)[0]
        assert [each.is_delta for each in found] == [False, True, True] and stub.versions == ["1", "2", "3"]
        assert stub.patched == all_elements + changed(fakes.values(1), fakes.values(2)) and found[2].nbytes == 0
        assert stub.requests[-3:] == ["/start_weight_update", "/weight_info", "/finish_weight_update"]
        assert equal(stub.weights, {name: each for name, each in fakes.values(2).items() if each.numel()})


def test_vllm_gets_all_elements_after_a_failure_and_for_another_version(pool: RankPool) -> None:
    with stubs.VLLMStub().serving() as stub:
        stub.is_sparse, stub.fails_at, stub.answers_version = True, "/finish_weight_update", ["1", "2", "another"]
        found = pool.run(updates, make=to_vllm_sparse, at=stub.url, steps=[1, 2, 3, 4], delta=True)[0]
        assert "out of memory" in found[0]
        assert [each.is_delta for each in found[1:]] == [False, True, False]
        assert equal(stub.weights, {name: each for name, each in fakes.values(4).items() if each.numel()})


def test_a_sparse_patch_cannot_carry_nan(pool: RankPool) -> None:
    with stubs.VLLMStub().serving() as stub:
        stub.is_sparse = True
        for rank, (failed, record) in enumerate(pool.run(with_nan, at=stub.url)):
            assert ("words has NaN" if rank == 0 else "1 of 4 ranks") in failed and not record.is_delta
        assert equal(stub.weights, {name: each for name, each in fakes.values(2).items() if each.numel()})


@pytest.mark.parametrize("count", [2, 3])
def test_vllm_that_has_received_nothing_is_resumed(pool: RankPool, count: int) -> None:
    with stubs.VLLMStub().serving() as stub:
        stub.fails_at = NEW_GROUP[count - 1]
        begin = time.monotonic()
        failed, record = pool.run(updates, make=to_vllm_paused, at=stub.url, steps=[1, 2])[0]
        assert time.monotonic() - begin < 15, "nothing waits for the whole time-out"
        assert "out of memory" in failed and record.version == 2
        assert stub.requests[: count + 2] == ["/pause", *NEW_GROUP[:count], "/resume"] and not stub.paused


@pytest.mark.parametrize(
    ("master", "host", "port"),
    [("node", "node", None), ("node:5000", "node", 5000), ("[::1]:5000", "::1", 5000), ("[::1]", "::1", None)],
)
def test_workers_meet_the_trainer_at(master: str, host: str, port: int | None) -> None:
    place = servers.meeting_place(master, lambda: "unused")
    assert place["master_address"] == host and place["master_port"] != DEFAULT_PORT
    assert port in (None, place["master_port"])


def test_vllm_goes_on_after_switches(pool: RankPool) -> None:
    path = [layout(short) for short in ("d4z3", "d2z1", "d3z2")]
    with stubs.VLLMStub().serving() as stub:
        found = pool.run(on_a_walk, make=to_vllm, at=stub.url, find=subjects.SUBJECTS["module"], path=path, seconds=200)
        assert stub.requests.count("/init_weight_transfer_engine") == 1, "the receiver lives on without a new group"
        assert stub.versions == ["1", "2", "3"]
        assert cases.differing(stub.weights, found[0][-1][1]) == []


def test_sglang_in_a_session(pool: RankPool) -> None:
    with stubs.SGLangStub().serving() as stub:
        records = pool.run(updates, make=to_sglang, at=stub.url, steps=[1, 2])[0]
        assert equal(stub.weights, fakes.values(2)) and stub.versions == ["1", "2"]
        buckets = stub.requests.count("/update_weights_from_distributed") // 2
        assert [each.rpcs for each in records] == [buckets + 5, buckets + 3]
        stub.other_replica = {"per_gpu_checksum": "?", "checksums": {}}
        assert "replicas of" in pool.run(updates, make=to_sglang, at=stub.url, steps=[3])[0][0]


def test_a_folder_for_each_version(pool: RankPool, tmp_path: Path) -> None:
    assert folder.newest(tmp_path) is None
    pool.run(updates, make=to_folder, at=str(tmp_path), steps=[1, 2])
    pool.run(updates, make=to_folder, at=str(tmp_path), steps=[3])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["v00000002", "v00000003"]
    found = folder.newest(tmp_path)
    assert found is not None and equal(folder.read(found), fakes.values(3))
    shard = next(found.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="digest"):
        folder.read(found)


def refused(make: Make, at: str) -> Any:
    """An update whose source refuses on all ranks, as in an open global batch, and then a good one."""
    receiver, source = make(at), fakes.fake_source(1)

    def refuse() -> Any:
        raise WeightsError("a global batch is open")
        yield

    source.iter_full = refuse  # type: ignore[method-assign]
    with pytest.raises(WeightsError, match="a global batch is open"):
        send(source, receiver)
    td.barrier()
    return send(fakes.fake_source(2), receiver).version


def test_a_source_that_refuses_reaches_all_ranks_and_no_server(pool: RankPool, tmp_path: Path) -> None:
    with stubs.SGLangStub().serving() as stub:
        assert pool.run(refused, make=to_sglang, at=stub.url) == [2] * 4
        assert stub.requests.count("/begin_weight_update") == 1
        assert equal(stub.weights, fakes.values(2))
    pool.run(refused, make=to_folder, at=str(tmp_path))
    found = folder.newest(tmp_path)
    assert found is not None and equal(folder.read(found), fakes.values(2))


def test_a_discarded_batch_sends_nothing(tmp_path: Path) -> None:
    with pytest.raises(WorldChanged, match="send: the world was aborted"):
        send(SimpleNamespace(is_discarded=True, turn=nullcontext), to_folder(str(tmp_path)))


def test_a_folder_keeps_the_newest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep=0"):
        folder.Folder(tmp_path, keep=0)


def test_deltas_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="whole tensors only"):
        send(fakes.FakeSource(fakes.values(1)), to_folder(str(tmp_path)), delta=True)


# ---- TRL and verl ----------------------------------------------------------------------------------------------------


def in_trl(path: str) -> Any:
    """What AsyncGRPOTrainer does with its `weight_transfer`, on all ranks."""
    accelerator = SimpleNamespace(is_main_process=td.get_rank() == 0)
    trainer = SimpleNamespace(accelerator=accelerator, weight_transfer=None, _streaming_iter=None)
    transfer = trl.TRLWeights(to_folder(path), lambda: fakes.fake_source(1))
    transfer.attach(trainer)
    if trainer.weight_transfer is None:
        assert list(trainer._streaming_iter()) == []
    else:
        trainer.weight_transfer.init_weight_transfer()
        trainer.weight_transfer.pause()
        trainer.weight_transfer.send_weights(trainer._streaming_iter())
        trainer.weight_transfer.resume()
        trainer.weight_transfer.destroy()
    return transfer.last


def test_trl_sends_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    records = pool.run(in_trl, path=str(tmp_path))
    assert [each.version for each in records] == [1] * 4
    found = folder.newest(tmp_path)
    assert found is not None and equal(folder.read(found), fakes.values(1))


def test_trl_has_the_methods_of_the_protocol() -> None:
    trainers = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    wanted = {name: call for name, call in vars(trainers.WeightTransferProtocol).items() if name[0] != "_"}
    assert hasattr(trainers.AsyncGRPOTrainer, "_streaming_iter"), "which `attach` replaces"
    transfer = trl.TRLWeights(Receiver(), lambda: None)
    with pytest.raises(UnsupportedError, match="has no _streaming_iter"):
        transfer.attach(SimpleNamespace())
    for name, call in wanted.items():
        inspect.signature(getattr(transfer, name)).bind(*list(inspect.signature(call).parameters)[1:])


def shards_of(cut: int) -> list[tuple[str, torch.Tensor, int, bool]]:
    return [
        (name, local.clone(), spec.place, spec.contributes)
        for name, local, spec in verl.shards(fakes.fake_source(1, cut=cut))
    ]


def test_verl_shards_make_up_the_tensors(pool: RankPool) -> None:
    found = pool.run(shards_of, cut=40)
    whole = {name: torch.full((held.numel(),), torch.nan) for name, held in fakes.values(1).items()}
    for rank in found:
        assert [name for name, *_ in rank] == list(fakes.SHAPES), "the same order on every rank"
        for name, local, place, contributes in rank:
            assert contributes == (len(local) > 0)
            whole[name][place : place + len(local)] = local
    assert equal({name: each.view(fakes.SHAPES[name]) for name, each in whole.items()}, fakes.values(1))


def test_verl_refuses_several_runs() -> None:
    with pytest.raises(UnsupportedError, match="words"):
        list(verl.shards(fakes.FakeSource(fakes.values(1), cut=5)))
