"""What follows from who is there: numbers, layouts for so many members, and what a newcomer has to have alike."""

from __future__ import annotations

from typing import Any

import pytest

from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.engine.elastic_membership import plain_part
from ds_dynatrain.engine.initialize import described, differing, differing_members
from ds_dynatrain.errors import ConfigError, SwitchRefused
from ds_dynatrain.membership.destinations import Registry, choose, rule_of
from ds_dynatrain.records import from_record, to_record
from ds_dynatrain.space import Layout

PRESENT = Layout(data=2, zero_stage=1)


def any_layout(layout: Layout) -> None:
    """Refuses nothing."""


def chosen(layouts: Any, members: int, present: Layout = PRESENT) -> Layout | None:
    return choose(rule_of(layouts), members, present, any_layout).layout


def by_hand(members: int, present: Layout) -> Any:
    """A policy of a user's."""
    return {1: None, 2: {"data": 1, "tensor": 2}, 3: present, 4: {"date": 4}}.get(members)


class TestRegistry:
    def test_numbers_are_never_given_twice(self) -> None:
        first = Registry().extended(["a/0", "a/1"])
        grown = first.extended(["a/1", "b/0"])
        assert grown.numbers == {"a/0": 0, "a/1": 1, "b/0": 2}
        left = grown.only(["a/1"])
        assert left.extended(["c/0"]).numbers == {"a/1": 1, "c/0": 3}

    def test_all_give_the_same_numbers(self) -> None:
        registry = Registry().extended(["a/0"])
        assert registry.extended(["a/0", "b/0", "c/0"]) == from_record(Registry, to_record(registry)).extended(
            ["b/0", "c/0"]
        )

    def test_ids(self) -> None:
        registry = Registry().extended(["a/0", "b/0", "c/0"])
        assert registry.ids_of([0, 2, 7]) == {"a/0", "c/0"}


class TestPolicy:
    @pytest.mark.parametrize(("members", "data"), [(1, 1), (2, 2), (5, 5)])
    def test_data_grows_and_shrinks(self, members: int, data: int) -> None:
        assert chosen("data", members) == Layout(data=data, zero_stage=1)

    def test_other_axes_stay(self) -> None:
        present = Layout(data=1, pipe=2, tensor=2, zero_stage=1)
        assert chosen("data", 11, present) == present.replace(data=2)
        assert chosen("data", 3, present) is None

    def test_experts_ask_for_a_multiple_of_their_number(self) -> None:
        assert chosen("data", 5, Layout(data=2, expert=2, zero_stage=2)) == Layout(data=4, expert=2, zero_stage=2)

    def test_the_largest_that_is_not_refused(self) -> None:
        def even(layout: Layout) -> None:
            if layout.data % 2:
                raise SwitchRefused("odd")

        choice = choose(rule_of("data"), 5, PRESENT, even)
        assert choice.layout == PRESENT.replace(data=4) and choice.refusals == ("data=5 zero_stage=1: odd",)

    def test_a_table(self) -> None:
        table = {"2": {"data": 2}, "4": {"data": 2, "tensor": 2, "zero_stage": None}, "6": {"data": 6, "zero_stage": 3}}
        assert chosen(table, 1) is None
        assert chosen(table, 3) == Layout(data=2, zero_stage=1)
        assert chosen(table, 5) == Layout(data=2, tensor=2, zero_stage=1)
        assert chosen(table, 60) == Layout(data=6, zero_stage=3)

    def test_a_table_that_asks_for_more_than_there_are(self) -> None:
        with pytest.raises(ConfigError, match=r'dynatrain.layouts.2: its layout needs 4 members; put it under "4"'):
            rule_of({"2": {"data": 4}})
        with pytest.raises(ConfigError, match=r"dynatrain.layouts.3: expert=2 does not divide"):
            rule_of({"3": {"data": 3, "expert": 2}})

    def test_a_function(self) -> None:
        name = f"{__name__}:by_hand"
        assert chosen(name, 1) is None
        assert chosen(name, 2) == Layout(data=1, tensor=2, zero_stage=1)
        assert chosen(name, 3) == PRESENT
        choice = choose(rule_of(name), 4, PRESENT, any_layout)
        assert choice.layout is None and "no 'date'" in choice.refusals[0]

    @pytest.mark.parametrize("name", ["dat", "nowhere:f", f"{__name__}:nothing", f"{__name__}:PRESENT"])
    def test_no_policy(self, name: str) -> None:
        with pytest.raises(ConfigError, match=r"dynatrain.layouts"):
            rule_of(name)

    def test_a_layout_that_is_too_large_is_refused(self) -> None:
        choice = choose(lambda members, present: iter([Layout(data=9, zero_stage=1)]), 4, PRESENT, any_layout)
        assert choice.layout is None and "needs 9 members, and there are 4" in choice.refusals[0]


class TestDescription:
    def test_the_key_that_differs_is_named(self) -> None:
        one = described({"optimizer": {"params": {"lr": 0.1}}, "train_batch_size": 4}, DynatrainConfig())
        other = described({"optimizer": {"params": {"lr": 0.2}}, "train_batch_size": 4}, DynatrainConfig())
        words = "here", "in the running job", "make them equal"
        assert differing(one, one, *words) == ""
        assert differing(other, one, *words).startswith("optimizer.params.lr is 0.2 here and 0.1 in the running job")

    def test_what_may_differ(self) -> None:
        one, other = DynatrainConfig(), DynatrainConfig.model_validate({"report": {"jsonl": "x"}})
        assert described({}, one) == described({}, other)

    def test_the_parameter_that_differs_is_named(self) -> None:
        one, other, none = (
            {"machine": {}, "rows": rows}
            for rows in ([["a", [2, 3], "torch.float32", "whole"]], [["a", [2, 4], "torch.float32", "whole"]], [])
        )
        words = "in the job", "here"
        assert differing_members(one, one, *words) == ""
        assert differing_members(one, other, *words).startswith("parameter 0 is ['a', [2, 3]")
        assert "not given here" in differing_members(one, none, *words)

    def test_what_json_has_a_word_for(self) -> None:
        assert plain_part({"epoch": 3, "model": object(), "more": {"x": (1, 2), "y": {1}}}) == {
            "epoch": 3,
            "more": {"x": [1, 2]},
        }
        assert plain_part(object()) is None and plain_part("path") == "path"
