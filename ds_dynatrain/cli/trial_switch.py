"""A switch between two processes on this machine, for `ds-dynatrain doctor --try`.

`tried_switch` starts this file under torchrun. As a script, the file trains a small model and switches once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from ds_dynatrain.report.check import Check

SECONDS = 300.0
"""The longest that the two processes may take. A first start compiles an operator of DeepSpeed for about a minute."""
ENDING_SECONDS = 30.0
"""The longest that torchrun may take to end the two processes after a time-out."""
_SWITCHES_AT, _ENDS_AT = 2, 4
_CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "dynatrain": {},
}


def tried_switch() -> Check:
    """Train with two processes, switch from ZeRO stage 1 to stage 3, and return the result or why it failed.

    The processes use the CPU unless this machine has two devices.
    """
    import torch

    device = {} if torch.cuda.device_count() > 1 else {"DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        seen, logs = Path(folder, "seen"), Path(folder, "logs")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--redirects=3"]
        command = [*launch, f"--log-dir={logs}", "-m", "ds_dynatrain.cli.trial_switch", str(seen)]
        env = {"OMP_NUM_THREADS": "1", **os.environ, **device}
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launched:
            try:
                code = launched.wait(SECONDS)
            except subprocess.TimeoutExpired:
                launched.terminate()  # torchrun then ends its workers
                with suppress(subprocess.TimeoutExpired):
                    launched.wait(ENDING_SECONDS)
                launched.kill()
                words = f"two processes did not finish in {SECONDS:.0f} s; {_last_line(logs)}"
                return Check("a switch", "hangs", False, words)
        if code:
            return Check("a switch", "fails", False, _last_line(logs))
        return Check("a switch", "works", True, seen.read_text())


def _last_line(logs: Path) -> str:
    """Return the last line that a rank wrote to standard error, where DeepSpeed and torch write their errors."""
    lines = [file.read_text(errors="replace").split("\n") for file in sorted(logs.rglob("stderr.log"))]
    return next((line for rank in lines for line in reversed(rank) if line.strip()), "they wrote nothing")


def _train(seen: Path) -> None:
    """Train a small model for four steps, with a switch after the second. Rank 0 writes its result to the
    file `seen`.
    """
    import torch
    from torch.nn import functional

    import ds_dynatrain

    torch.manual_seed(0)
    inputs = torch.randn(8 * _ENDS_AT, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.GELU(), torch.nn.Linear(256, 4))
    engine, _, loader, _ = ds_dynatrain.initialize(model=model, config=_CONFIG, training_data=data)
    for batch, targets in loader:
        if engine.global_steps == _SWITCHES_AT:
            engine.switch(zero_stage=3, at=_SWITCHES_AT)
        engine.backward(functional.cross_entropy(engine(batch.to(engine.device)), targets.to(engine.device)))
        engine.step()
    event = engine.last_switch
    if event is None or event.outcome != "committed":
        raise RuntimeError(f"the switch was not made: {event}")
    if engine.global_rank == 0:
        side = f"{event.source.describe()} -> {event.target.describe()}"
        seen.write_text(f"2 processes on {engine.device.type}, {side} in {event.pause_ms:.0f} ms, certificate ok")


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
