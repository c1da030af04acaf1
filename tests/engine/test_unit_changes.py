"""Several engines of a process in a void global batch: until when what another than the first deals is void."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ds_dynatrain.engine.members.changes import Changes
from ds_dynatrain.engine.members.voiding import Window


def engine(is_void: bool) -> Any:
    """As far as it is asked."""
    made = SimpleNamespace(is_void=is_void, turn=nullcontext, voided=0)

    def void_window() -> None:
        made.voided += 1

    made.void_window = void_window
    return made


@pytest.fixture
def changes() -> Changes:
    """Of three engines, none of them void."""
    made = Changes(SimpleNamespace())  # type: ignore[arg-type]
    made.engines += [engine(False) for _ in range(3)]
    return made


def test_what_others_deal_is_void_as_long_as_the_first_is(changes: Changes) -> None:
    for each in changes.engines:
        vars(each)["is_void"] = False
    assert not any(changes.keeps_void(each) for each in changes.engines)
    vars(changes.engines[0])["is_void"] = True
    assert [changes.keeps_void(each) for each in changes.engines] == [False, True, True]
    vars(changes.engines[0])["is_void"] = False
    vars(changes.engines[1])["is_void"] = True
    assert not any(changes.keeps_void(each) for each in changes.engines), "its own next batch is a new one"


def test_at_the_boundary_of_the_first_others_go_back(changes: Changes) -> None:
    """To where their global batches began, whatever they have dealt since."""
    vars(changes.engines[1])["is_void"] = True
    changes._end_void()
    _, second, third = (vars(each) for each in changes.engines)
    assert (second["voided"], second["is_void"]) == (1, False) and third["voided"] == 0


class Loader:
    """One that has a position."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])


def test_a_void_batch_after_a_restoration_is_dealt_again_from_there() -> None:
    """Torn between two batches, taken back, asked once more before the first engine's next batch."""
    loader = Loader()
    window = Window(SimpleNamespace(train_loaders={"train": loader}, is_void=False))  # type: ignore[arg-type]
    loader.at = 16
    window.void(has_dealt=False)
    loader.at = 15  # what was restored
    window.note()
    window.open(stays_void=True)
    loader.at += 1
    window.void(has_dealt=True)
    assert loader.at == 15


@pytest.mark.parametrize("is_part_of_a_change", [False, True])
def test_a_part_of_a_change_waits_for_the_first_engine(changes: Changes, is_part_of_a_change: bool) -> None:
    """At its own boundary another engine begins what its user asked for, and nothing else."""
    begun = list[str]()
    engine = changes.engines[1]
    vars(changes.engines[0])["has_stood"] = True
    vars(engine)["switcher"] = SimpleNamespace(is_due=lambda: True)
    vars(engine)["attempts"] = SimpleNamespace(transact=begun.append)
    vars(engine).update(idle=False, job=SimpleNamespace(number=2))
    vars(changes).update(forming=SimpleNamespace(see_failure=lambda: None), elastic=SimpleNamespace(is_torn=False))
    vars(changes)["change"] = SimpleNamespace(proposals=("its part",) if is_part_of_a_change else ())
    changes._stand_beside(engine, "train", window_is_open=False)
    assert begun == ([] if is_part_of_a_change else ["train"])
