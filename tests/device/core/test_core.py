"""The core of the engine's tests on the device, as they stand: imported here, they find its ranks."""

from __future__ import annotations

from tests.engine.test_chains import (  # noqa: F401
    test_accumulation_is_exact_in_worlds_1_to_4,
    test_chain_of_20_stays_within_the_spread_of_static_runs,
    test_switch_before_the_first_step,
)
from tests.engine.test_checkpoints import test_save_after_a_switch_and_load  # noqa: F401
from tests.engine.test_faults import test_ten_faults_are_found_and_leave_no_trace  # noqa: F401
from tests.engine.test_matrix import test_a_part_of_all_pairs  # noqa: F401
from tests.engine.test_members import (  # noqa: F401
    test_dropout_goes_on_as_if_nothing_had_happened,
    test_idle_member_holds_nothing,
    test_streams_stay_with_their_place,
    test_woken_members_take_over_from_rank_0,
)
from tests.engine.test_start import (  # noqa: F401
    test_a_part_of_the_processes_trains,
    test_members_wake_and_go_idle,
)
