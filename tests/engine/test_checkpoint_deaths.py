"""A member that is killed in a save or a load: the others say who, have what they had, and so has the folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as td

from ds_dynatrain.checkpoint import folder
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.engine.checkpoints.saving import _Saving
from ds_dynatrain.errors import CheckpointError, MemberMissing
from ds_dynatrain.reshard.restoration import Restoration
from tests.engine import jobs
from tests.engine.pool import Died, RankPool

VICTIM, SECONDS = 1, 3.0


def held(engine: Any) -> dict[str, Any]:
    """This member's state, without a message to anybody."""
    buffers, scalars = engine._host.state_buffers()
    found: dict[str, Any] = {str(key): value.clone() for key, value in buffers.items()}
    return {**found, "scalars": scalars.values, "steps": engine.global_steps, "stream": torch.get_rng_state()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]
        for name, value in one.items()
    )


def case(path: Path, kind: type, method: str) -> str:
    """Save, train on, and have the victim killed right before a method of the next save, or of a load."""
    settings = jobs.config("bf16", (3, 2))
    settings["dynatrain"]["timeout_seconds"] = SECONDS
    with jobs.job(settings) as made:
        engine = made.engine
        if engine.idle:
            return ""
        batches = iter(made.loader)
        jobs.one_micro_batch(engine, next(batches), jobs.Record())
        engine.save(path, "before")
        jobs.one_micro_batch(engine, next(batches), jobs.Record())
        before = held(engine)

        def killed(self: Any, *_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        call = engine.load if kind is Restoration else engine.save
        try:
            if td.get_rank() == VICTIM:
                with patch.object(kind, method, killed):
                    call(path)
            else:
                call(path)
        except (CheckpointError, MemberMissing) as error:
            assert same(before, held(engine)), "nothing may have changed"
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (_Saving, "_write"),
        (Restoration, "_swap"),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (
                (_Saving, "take"),
                (_Saving, "carry_out"),
                (Restoration, "_read"),
                (Restoration, "_verify_tensors"),
                (Restoration, "_verify_carry"),
            )
        ),
    ],
)
def test_killed(pool: RankPool, tmp_path: Path, kind: type, method: str) -> None:
    found = pool.run(case, path=tmp_path, kind=kind, method=method, may_die=[VICTIM], seconds=90)
    assert found[VICTIM] == Died(-signal.SIGKILL)
    for rank in (0, 2):
        assert f"member {VICTIM}" in found[rank], found[rank]
    assert folder.latest(tmp_path) == "before" and folder.tags(tmp_path) == ["before"]
    assert Saved.open(tmp_path / "before").record.step == 1
