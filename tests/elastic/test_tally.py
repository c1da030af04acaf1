"""What a member's time goes into, by a clock that a test turns; and how it tells of a switch."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_dynatrain.elastic.messages import LARGEST_GREETING, LONGEST_WORDS, encode
from ds_dynatrain.membership.tally import Clock, switch_message
from ds_dynatrain.report import Side, SwitchEvent
from ds_dynatrain.report.monitors import rows


@dataclass
class Turned:
    """A clock, and the hand that turns it."""

    now: float = 50.0
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(lambda: self.now)

    def boundary(self, step: int, held: float = 0.0, goes_on_with: int | None = None) -> None:
        self.clock.arrive(step)
        self.now += held
        self.clock.depart(step if goes_on_with is None else goes_on_with, samples=12 * step)

    @property
    def figures(self) -> tuple[int, float, float, float]:
        tally = self.clock.tally
        return tally.steps, tally.stepping_seconds, tally.held_seconds, tally.saving_seconds


def test_steps_and_standstills() -> None:
    turned = Turned()
    turned.boundary(1000, held=2.0)
    turned.now += 3.0
    turned.boundary(1001, held=0.5)
    turned.now += 3.0
    turned.boundary(1002)
    assert turned.figures == (2, 6.0, 2.5, 0.0) and turned.clock.tally.samples == 12024


def test_a_discarded_batch_is_no_step() -> None:
    """The world is formed anew in the middle of it, which takes 4 s, and the batch is dealt again."""
    turned = Turned()
    turned.boundary(7)
    turned.now += 1.0 + 4.0
    turned.clock.start_over(7)
    turned.boundary(7)
    turned.now += 3.0
    turned.boundary(8)
    assert turned.figures == (1, 3.0, 5.0, 0.0)


def test_a_step_that_all_had_made_when_one_died_counts() -> None:
    turned = Turned()
    turned.boundary(7)
    turned.now += 2.0
    turned.clock.start_over(8)
    assert turned.figures == (1, 0.0, 2.0, 0.0)


def test_steps_back_are_made_again() -> None:
    """From step 8 back to 5: one step more each, though the number has gone back."""
    turned = Turned()
    turned.boundary(7)
    turned.now += 1.0
    turned.boundary(8, held=2.0, goes_on_with=5)
    for step in (6, 7):
        turned.now += 1.0
        turned.boundary(step)
    assert turned.figures == (3, 3.0, 2.0, 0.0)


def test_a_load_in_between_is_no_step() -> None:
    turned = Turned()
    turned.boundary(0)
    turned.now += 5.0
    turned.boundary(1000)
    assert turned.figures == (0, 0.0, 5.0, 0.0)


def test_waiting_for_work_counts_for_nothing_and_saving_for_itself() -> None:
    turned = Turned()
    turned.clock.arrive(0)
    turned.now += 100.0
    turned.clock.skip()
    turned.now += 1.0
    with turned.clock.saving():
        turned.now += 0.5
    turned.clock.depart(4, 48)
    assert turned.figures == (0, 0.0, 1.5, 0.5)


def event(**given: object) -> SwitchEvent:
    sides = Side({"data": 1, "zero_stage": 1}, (0,)), Side({"data": 2, "zero_stage": 3}, (0, 1))
    return SwitchEvent("committed", 4, 17, *sides, bytes_sent=9, phases_ms={"move": 3.0}, pause_ms=5.0, **given)


def test_a_switch_is_told_in_what_a_message_may_hold() -> None:
    said = switch_message(2, event(reason="a\nlong " * 200))
    assert (said.engine, said.number, said.step, said.members, said.committed) == (2, 4, 17, 2, True)
    assert said.target == "data=2 zero_stage=3" and said.phases_ms == {"move": 3.0}
    assert len(said.reason) == LONGEST_WORDS and "\n" not in said.reason and len(encode(said)) < LARGEST_GREETING


def test_rows_of_monitors() -> None:
    assert {name: value for name, value, at in rows(event(), 204) if at == 204} == {
        "Dynatrain/committed": 1.0,
        "Dynatrain/pause_ms": 5.0,
        "Dynatrain/world_size": 2,
        "Dynatrain/zero_stage": 3,
        "Dynatrain/sent_bytes": 9,
    }
    gone_back = SwitchEvent("rolled_back", 4, 17, event().source, event().target, pause_ms=5.0)
    assert rows(gone_back, 204) == [("Dynatrain/committed", 0.0, 204), ("Dynatrain/pause_ms", 5.0, 204)]
