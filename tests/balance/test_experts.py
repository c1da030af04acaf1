"""Swaps of experts: as good as the best map, moved where that pays, and said layer by layer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from ds_dynatrain.balance.advice import Advice, MoveCost, Situation, advise
from ds_dynatrain.balance.config import BalanceConfig
from ds_dynatrain.balance.decision import Answer, BetterLayout, DecisionHistory
from ds_dynatrain.balance.experts import bound, busiest, rows_of, swapped
from ds_dynatrain.balance.profile import ExpertCost, Profile
from ds_dynatrain.balance.window import FADING, ExpertTimes
from ds_dynatrain.errors import ProfileError
from ds_dynatrain.space.layout import ExpertMap, Layout
from tests.balance.profiles import profile
from tools.drifting_routes import COST, STEP, drifting

TWO = Layout(data=2, expert=2, zero_stage=1)
SKEWED = (0.4, 0.3, 0.2, 0.1)
"""The first two experts are on the first index: 1.4 of the mean there."""


def cost(tokens: Sequence[float] = SKEWED, **more: object) -> ExpertCost:
    """Of the only layer, which takes 3 s, a third of it for its experts."""
    rows = rows_of(TWO, 0, len(tokens))
    known = {"name": "mlp", "layer": 0, "forward_seconds": 0.4, "backward_seconds": 0.6, "rows": rows}
    return ExpertCost(**{**known, "tokens": tuple(tokens), **more})  # type: ignore[arg-type]


def measured(*costs: ExpertCost) -> Profile:
    return replace(profile((1.0,), batch=2, speeds=(1.0, 1.0)), experts=costs or (cost(),))


@pytest.mark.parametrize("skew", [0.6, 1.0])
def test_swaps_are_as_good_as_the_best_map(skew: float) -> None:
    """8 experts on 2 ranks, by exhaustion."""
    random = np.random.default_rng(0)
    shares = np.arange(1, 9) ** -skew
    for _ in range(200):
        tokens = random.multinomial(4096, random.permutation(shares / shares.sum())).astype(float)
        best = min(max(tokens[list(half)].sum(), 4096 - tokens[list(half)].sum()) for half in combinations(range(8), 4))
        assert busiest(tokens, swapped(tokens, rows_of(TWO, 0, 8))) <= 1.02 * best / 2048


@pytest.mark.parametrize("indices", [2, 3, 4, 6, 8])
def test_each_expert_keeps_one_place_and_nothing_gets_worse(indices: int) -> None:
    random, rows = np.random.default_rng(indices), rows_of(Layout(data=indices, expert=indices, zero_stage=1), 0, 24)
    for _ in range(40):
        tokens = (random.pareto(1.0, 24) * random.integers(0, 2, 24)).tolist()
        found = swapped(tokens, rows)
        assert sorted(sum(found, ())) == [*range(24)] and {len(each) for each in found} == {24 // indices}
        assert bound(cost(tokens), indices) * (1 - 1e-9) <= busiest(tokens, found) <= busiest(tokens, rows) + 1e-9


def test_without_a_map_the_first_index_has_the_first_experts() -> None:
    assert rows_of(TWO, 0, 4) == ((0, 1), (2, 3)) and busiest(SKEWED, ((0, 1), (2, 3))) == pytest.approx(1.4)
    assert rows_of(TWO.replace(experts=[[[0, 3], [2, 1]]]), 0, 4) == ((0, 3), (2, 1))
    assert busiest((0.0,) * 4, ((0, 1), (2, 3))) == 1.0 == bound(cost((0.0,) * 4), 2)


def test_two_large_experts_part() -> None:
    assert swapped(SKEWED, ((0, 1), (2, 3))) == ((2, 1), (0, 3))


# ---- advice ----------------------------------------------------------------------------------------------------------


def asked(
    found: Profile,
    present: Layout = TWO,
    experts: bool = True,
    history: DecisionHistory | None = None,
    is_refused: bool = False,
    seconds: float = 0.1,
) -> Advice:
    rules = BalanceConfig(experts=experts)
    at = Situation(present, lambda _: 1, 50, history or DecisionHistory(), rules, pipeline=False)
    return advise(found, at, lambda *_: None if is_refused else MoveCost(8, seconds))


def test_experts_swap_where_that_pays() -> None:
    advice = asked(measured())
    assert advice.proposed.experts == (((2, 1), (0, 3)),) and advice.decision.answer is Answer.ACT
    saved = advice.present_time.seconds - advice.proposed_time.seconds
    assert saved == pytest.approx(0.4), "of experts that take 1 s, and 1.4 s on the busier rank"
    assert "experts of mlp: most tokens ÷ mean 1.400 now, 1.000 after swaps; at least 1.000" in str(advice)
    dear = asked(measured(), seconds=1e6)
    assert dear.decision.answer is Answer.DEAR and dear.proposed == advice.proposed


def test_a_layer_that_gains_little_keeps_its_experts() -> None:
    advice = asked(measured(cost(), cost((0.26, 0.25, 0.25, 0.24), name="even")))
    assert advice.proposed.experts is not None and advice.proposed.experts[1] == ((0, 1), (2, 3))
    assert "experts of even: most tokens ÷ mean 1.020 now, no swap pays; at least 1.000" in str(advice)


@pytest.mark.parametrize(
    "advice",
    [
        asked(measured(), experts=False),
        asked(measured(), is_refused=True),
        asked(replace(measured(), experts=())),
        asked(measured(), Layout(data=2, zero_stage=1)),
    ],
)
def test_nothing_is_swapped(advice: Advice) -> None:
    """Unasked, where a switch would be refused, unmeasured, and where each rank has all experts."""
    assert advice.proposed == advice.present


def test_an_earlier_map_that_is_almost_as_good_stays_the_proposal() -> None:
    """So time lost against it goes on counting; a new one counts from the last window on."""
    other: ExpertMap = (((3, 0), (1, 2)),)
    known = BetterLayout(TWO.replace(experts=other), (), 7.0)
    advice = asked(measured(), history=DecisionHistory(step=40, rivals=(known,)))
    assert advice.proposed.experts == other and advice.rivals[-1].lost_seconds == pytest.approx(7.0 + 10 * 0.4)
    worse = BetterLayout(TWO.replace(experts=(((1, 0), (3, 2)),)), (), 7.0)
    advice = asked(measured(), history=DecisionHistory(step=40, rivals=(worse,)))
    assert advice.proposed.experts == (((2, 1), (0, 3)),) and advice.rivals[-1].lost_seconds == pytest.approx(4.0)


@pytest.mark.full
def test_moves_pay_while_routes_drift() -> None:
    """1,000 windows, after which the shares of the experts are other ones."""
    made, seconds, without_moves = drifting(0, 0.03)
    assert made and sum(move.saved > COST for move in made) >= 0.9 * len(made)
    assert seconds < 1.05 * STEP < without_moves


# ---- what is measured ------------------------------------------------------------------------------------------------


def test_older_tokens_fade() -> None:
    older, newer = (ExpertTimes(np.array([each, 2 * each]), np.array([8.0 * each, 0.0])) for each in (1.0, 3.0))
    assert older.plus(newer).tokens.tolist() == [32.0, 0.0]
    mean = older.then(newer, 0.25)
    assert mean.passes.tolist() == [1.5, 3.0] and mean.tokens.tolist() == [24.0 + FADING * 8.0, 0.0]


def test_a_file_keeps_them() -> None:
    assert Profile.from_json(measured().to_json()) == measured()
    assert Profile.from_json(json.dumps({**json.loads(measured().to_json()), "experts": []})).experts == ()


@pytest.mark.parametrize("rows", [((0, 1), (2,)), ((0, 1), (1, 2)), ((0, 1), (2, 4))])
def test_rows_deal_all_experts(rows: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ProfileError, match=re.escape(f"rows {rows} do not deal 4 experts evenly")):
        cost(rows=rows)
