"""A failure of the world that is noticed while one of DeepSpeed's calls reads its samples."""

from __future__ import annotations

from typing import Any

import pytest

from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.address import Address
from ds_dynatrain.elastic.environment import WorkerPlace
from ds_dynatrain.elastic.member import Ending
from ds_dynatrain.engine import elastic_membership
from ds_dynatrain.engine.elastic_membership import ElasticMembership
from ds_dynatrain.errors import WorldChanged


class FailingMembership(ElasticMembership):
    """With a failure that comes in the call, and where a world is formed."""

    def __init__(self) -> None:
        super().__init__(WorkerPlace("a", 0, 1, Address("127.0.0.1", 1)), DynatrainConfig())
        self.has_failed, self.is_under_way, self.made_anew = False, False, list[str]()

    def check_losses(self) -> None:
        if self.has_failed:
            raise WorldChanged("a collective has failed before")

    def explains(self, error: RuntimeError) -> bool:
        return isinstance(error, WorldChanged)

    def see_failure(self) -> None:
        if self.has_failed:
            self.form_anew()

    def form_anew(self) -> None:
        self.made_anew.append("in the call" if self.is_under_way else "after it")
        self.has_failed = False


@pytest.fixture
def membership() -> Any:
    return FailingMembership()


def test_no_world_is_formed_in_the_middle_of_a_call(membership: Any) -> None:
    """DeepSpeed's pipeline holds activations then, which would be gone."""

    def call() -> str:
        membership.is_under_way = membership.has_failed = True
        try:
            membership.before_micro_batch(None)
        finally:
            membership.is_under_way = False
        return "trained on"

    assert membership.surviving(None, call, lambda: "again") == "again"
    assert membership.made_anew == ["after it"]


def test_between_calls_the_loader_forms_it(membership: Any) -> None:
    assert membership.surviving(None, lambda: "done", lambda: "again") == "done"
    membership.has_failed = True
    membership.before_micro_batch(None)
    assert membership.made_anew == ["after it"]


@pytest.mark.parametrize("said", ["", "an illegal memory access was encountered"])
def test_an_accelerator_that_takes_nothing_any_more_ends_the_process(
    membership: Any, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """An error of the user's own is raised as it is."""
    ended = list[tuple[Ending, str]]()
    monkeypatch.setattr(elastic_membership, "device_error", lambda: said)
    monkeypatch.setattr(elastic_membership, "end_process", lambda *given: ended.append(given))

    def call() -> str:
        raise RuntimeError("an error in a call")

    with pytest.raises(RuntimeError, match="an error in a call"):
        membership.surviving(None, call, lambda: "again")
    assert ended == ([(Ending.DEVICE, f"its accelerator takes nothing any more: {said}")] if said else [])
