"""A start that waits for the compilation of an operator says so: a job that was killed may have left its lock."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from torch.utils import cpp_extension

from ds_dynatrain.adapters.deepspeed import start
from ds_dynatrain.report import log

ROOT = Path(__file__).parents[2]
LIMIT = 0.3
needs_batons = pytest.mark.skipif(
    not hasattr(cpp_extension, "FileBaton"), reason=f"torch {torch.__version__} does not wait for files that were left"
)


@pytest.fixture(autouse=True)
def wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an import of the engine puts in torch's place, for a while."""
    if hasattr(cpp_extension, "FileBaton"):
        monkeypatch.setattr(cpp_extension.FileBaton, "wait", cpp_extension.FileBaton.wait)
    monkeypatch.setattr(OpBuilder, "jit_load", OpBuilder.jit_load)
    start.tell_of_compilers()


def compiled(folder: Path, name: str) -> None:
    """torch waits for the lock, and then finds that nothing was compiled."""
    source = folder / "operator.cpp"
    source.touch()
    with pytest.raises(ImportError):
        cpp_extension.load(name=name, sources=[str(source)], build_directory=str(folder))


@needs_batons
def test_a_lock_that_was_left_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "LOCK_SECONDS", LIMIT)
    lock = tmp_path / "lock"
    lock.touch()
    said: list[str] = []

    def remove_when_told() -> None:
        end = time.monotonic() + 20
        while not caplog.messages and time.monotonic() < end:
            time.sleep(0.05)
        said.extend(caplog.messages)
        lock.unlink()

    user = threading.Thread(target=remove_when_told, daemon=True)
    user.start()
    begin = time.monotonic()
    compiled(tmp_path, "left")
    assert time.monotonic() - begin > LIMIT
    user.join()
    assert len(caplog.messages) == 1, "once"
    assert str(lock) in said[0] and f"user {os.geteuid()}" in said[0] and f"rm '{lock}'" in said[0]


@needs_batons
def test_a_short_wait_is_nobodys_affair(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    threading.Timer(LIMIT, lock.unlink).start()
    compiled(tmp_path, "soon")
    assert not caplog.messages


@needs_batons
def test_one_process_of_a_node_names_the_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "LOCK_SECONDS", LIMIT)
    monkeypatch.setenv("LOCAL_RANK", "1")
    lock = tmp_path / "lock"
    lock.touch()
    threading.Timer(4 * LIMIT, lock.unlink).start()
    compiled(tmp_path, "second")
    assert not caplog.messages


def test_a_compilation_that_takes_long_is_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whichever operator, whether this process compiles it or another one does."""
    monkeypatch.setattr(log, "LONG_SECONDS", LIMIT)
    monkeypatch.setattr(start, "jit_load", lambda builder, verbose: time.sleep(4 * LIMIT))
    caplog.set_level("INFO", "ds_dynatrain")
    ShareMemCommBuilder().jit_load()
    assert [message.partition(",")[0] for message in caplog.messages] == [
        f"has waited {LIMIT:g} s for the operator deepspeed_shm_comm"
    ]


SCRIPT = """
import sys
import deepspeed
from torch import nn
import ds_dynatrain
from ds_dynatrain import initialize
from ds_dynatrain.adapters.deepspeed import start
start.LOCK_SECONDS = 0.5
config = {"train_batch_size": 4, "dynatrain": {}, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
if sys.argv[1] == "first":
    ds_dynatrain.init_distributed()
if sys.argv[1] == "stock":
    deepspeed.init_distributed()
if sys.argv[1] == "trainer":
    from ds_dynatrain.integrations.transformers import elastic
    from transformers import TrainingArguments
    TrainingArguments(output_dir="/dev/null", deepspeed=config, report_to=[])
initialize(model=nn.Linear(2, 2), config=config)
"""


@needs_batons
@pytest.mark.full
@pytest.mark.parametrize("call", ["first", "initialize", "stock", "trainer"])
def test_the_start_of_a_job_tells(tmp_path: Path, call: str) -> None:
    """DeepSpeed builds an operator of its CPU back-end first of all, in whichever call comes first."""
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    environment = {**os.environ, **place, "TORCH_EXTENSIONS_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": path}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", SCRIPT, call]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        timer = threading.Timer(240, job.kill)
        timer.start()
        seen = []
        for line in job.stdout:
            seen.append(line)
            if str(lock) in line:
                break
        timer.cancel()
        job.kill()
    assert seen and f"rm '{lock}'" in seen[-1], "".join(seen)
