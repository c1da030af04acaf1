"""Jobs started by `deepspeed` and by `accelerate launch`, with commands of docs/launchers.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.pool import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "integrations" / "launched.py"
SECONDS = 240.0
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--mixed_precision=no", "--dynamo_backend=no")


def start(*words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    """Return what a launcher printed, which must have ended with code 0."""
    try:
        printed, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, printed[-4000:]
    return printed


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(("-m", "deepspeed.launcher.runner", "--num_gpus=2"), id="deepspeed"),
        pytest.param((*ACCELERATE, "--num_processes=2"), id="accelerate"),
    ],
)
def test_a_fixed_number_of_processes_switches(launcher: tuple[str, ...]) -> None:
    port = ("--main_process_port" if "--multi_gpu" in launcher else "--master_port", str(free_port()))
    printed = ended(start(*launcher, *port, str(SCRIPT), "switch"))
    assert "rank 0: 8 steps, data=1 zero_stage=1" in printed


@pytest.mark.full
def test_deepspeed_starts_the_chosen_slots_of_the_hosts_of_a_file(tmp_path: Path) -> None:
    """Two hosts of one machine, whose launchers are started by hand, as `--no_ssh` asks."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=4\n127.0.0.1 slots=4\n")
    choice = (
        "--include=localhost:1@127.0.0.1:2",
        "--no_ssh",
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
    )
    deepspeed = ("-m", "deepspeed.launcher.runner", f"--hostfile={hosts}", *choice)
    machines = [start(*deepspeed, f"--node_rank={rank}", str(SCRIPT), "switch") for rank in range(2)]
    try:
        printed = "".join(ended(machine) for machine in machines)
    finally:
        for machine in machines:
            machine.kill()
    assert "rank 0: 8 steps, data=1 zero_stage=1" in printed


@pytest.mark.full
def test_accelerate_starts_nodes_of_an_elastic_job() -> None:
    port = str(free_port())
    coordinator = start("-m", "ds_dynatrain.cli", "coordinator", f"127.0.0.1:{port}", "--nnodes", "2:3")
    machines = ("--num_machines=2", "--machine_rank=1", "--num_processes=2", "--main_process_ip=127.0.0.1")
    rendezvous = (f"--main_process_port={port}", "--rdzv_backend=dynatrain", "--rdzv_conf=is_host=0")
    nodes = [start(*ACCELERATE, *machines, *rendezvous, str(SCRIPT), "elastic") for _ in range(2)]
    try:
        printed = "".join(ended(node) for node in nodes)
        ended(coordinator)
    finally:
        for process in (coordinator, *nodes):
            process.kill()
    assert "rank 0: 8 steps, data=2 zero_stage=1" in printed
