"""DeepSpeed's own save and load around switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine import jobs, oracle
from tests.engine.pool import RankPool

SAVED_AT, STEPS = 5, 8


def saving_case(dtype: str, start: jobs.Sizes, target: jobs.Sizes, folder: str) -> Any:
    """Switch after 2 steps, save at step 5, go on to 8; losses, and the loader's position when it was saved."""
    position, record = dict[str, Any](), jobs.Record()
    with jobs.job(jobs.config(dtype, start, train_micro_batch_size_per_gpu=12)) as made:

        def save(job: jobs.Job) -> None:
            if job.engine.global_steps == SAVED_AT:
                position.update(job.loader.state_dict())
                job.engine.save_checkpoint(folder, client_state={"mine": 7})

        jobs.train(made, STEPS, {2: target}, record, each=save)
        return record, position, oracle.gather(made.engine)
    return record, position, None


def loading_case(dtype: str, sizes: jobs.Sizes, folder: str, position: dict[str, Any]) -> Any:
    """Start in the layout that was saved, load, and train on."""
    with jobs.job(jobs.config(dtype, sizes, train_micro_batch_size_per_gpu=12)) as made:
        if made.engine.idle:
            return None, {}, None
        path, client_state = made.engine.load_checkpoint(folder)
        assert path is not None
        made.loader.load_state_dict(position)
        return jobs.train(made, STEPS), client_state, oracle.gather(made.engine)
    return None, {}, None


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("start", "target"), [((4, 1), (2, 1)), ((2, 1), (4, 3)), ((4, 3), (2, 2)), ((2, 3), (3, 0))])
def test_save_after_a_switch_and_load(
    pool: RankPool, tmp_path: Path, dtype: str, start: jobs.Sizes, target: jobs.Sizes
) -> None:
    saved = pool.run(saving_case, dtype=dtype, start=start, target=target, folder=str(tmp_path))
    position = saved[0][1]
    loaded = pool.run(loading_case, dtype=dtype, sizes=target, folder=str(tmp_path), position=position)
    expected = jobs.global_losses([record for record, _, _ in saved])
    assert jobs.global_losses([record for record, _, _ in loaded]) == expected[SAVED_AT:]
    assert loaded[0][1]["mine"] == 7
    assert oracle.differences(loaded[0][2], saved[0][2]) == []
