"""What buddies are refused with; `tests/elastic/test_buddies.py` has what they do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.engine import initialize
from ds_dynatrain.engine.members.elastic_membership import ElasticMembership
from ds_dynatrain.engine.members.fixed_launch import FixedLaunch
from ds_dynatrain.errors import UnsupportedError


def settings(**buddies: Any) -> DynatrainConfig:
    """A block with buddies."""
    return DynatrainConfig.model_validate({"buddies": {"mode": "copy", **buddies}})


def elastic() -> ElasticMembership:
    """One that asks nobody."""
    return ElasticMembership(cast(Any, SimpleNamespace()))


def test_in_a_launch_of_fixed_size() -> None:
    with pytest.raises(UnsupportedError, match="buddies in a launch of fixed size: nobody comes or goes there"):
        FixedLaunch().refuse(settings(), nn.Linear(2, 2))
    FixedLaunch().refuse(settings(mode="off"), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [({"mode": "replay"}, "buddies that replay steps"), ({"copies": 2}, "several buddies for a member")],
)
def test_what_is_not_there_yet(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        elastic().refuse(settings(**given), nn.Linear(2, 2))


@pytest.mark.parametrize("mode", ["copy", "auto", "off"])
def test_what_is_there(mode: str) -> None:
    elastic().refuse(settings(mode=mode), nn.Linear(2, 2))


def test_beside_another_engine() -> None:
    """Whichever of them is to have buddies."""
    for one, other in ((settings(), settings(mode="off")), (settings(mode="off"), settings())):
        there: Any = SimpleNamespace(settings=other)
        with pytest.raises(UnsupportedError, match="buddies beside another engine"):
            initialize._refuse_beside([there], one, nn.Linear(2, 2), None)
