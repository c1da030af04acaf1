"""What runs on the device without hardware, on a card: `tools/gpu_check.py` runs it part by part."""

from __future__ import annotations

from tests.device import test_switch_memory
from tests.device.core.test_axes import *  # noqa: F403
from tests.device.core.test_core import *  # noqa: F403
from tests.engine import test_sequence, walks
from tests.engine.paths import circuit
from tests.engine.pool import RankPool
from tests.engine.test_compile import test_compiled_parts  # noqa: F401
from tests.engine.test_engines import test_each_trains_as_if_alone  # noqa: F401
from tests.engine.test_late import test_changes_train_as_without_it  # noqa: F401

SEED, SWITCHES = 5, 12


def test_pairs_of_two(pool: RankPool) -> None:
    """Of stages and sizes, on two ranks at most: for a card on which collectives of four take too long."""
    path = [sizes for sizes in circuit(SEED) if sizes[0] <= 2]
    walks.compare(pool, walks.settings("bf16"), path[: SWITCHES + 1])


def test_sequence_parallel(pool: RankPool) -> None:
    """Of the full set elsewhere, and the only one of this axis here."""
    for layout in test_sequence.LAYOUTS:
        test_sequence.test_every_layout_computes_the_same(pool, layout)


def test_fused(pool: RankPool) -> None:
    test_switch_memory.test_counts_of_fused_optimizers_stay_on_the_device(pool)
