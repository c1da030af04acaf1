"""What an engine gives back lies where the user's script has its own."""

from __future__ import annotations

from tests.engine import jobs
from tests.engine.pool import RankPool


def means() -> list[tuple[str, float]]:
    import torch

    with jobs.job(jobs.config("fp32", (4, 1))) as made:
        engine = made.engine
        values = torch.tensor(float(engine.rank), device=engine.device), torch.tensor(float(engine.rank)), engine.rank
        found = [engine.mean(value, 1) for value in values]
        return [(mean.device.type, float(mean)) for mean in found]


def test_a_mean_is_where_its_value_is(lab_pool: RankPool) -> None:
    assert lab_pool.run(means) == [[("lab", 1.5), ("cpu", 1.5), ("cpu", 1.5)]] * 4
