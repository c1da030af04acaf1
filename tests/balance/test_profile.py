"""Profiles: every digit comes back, and what cannot be is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dynatrain.balance.profile import LayerCost, Profile
from ds_dynatrain.errors import ProfileError
from tests.balance.profiles import layer, profile

seconds = st.floats(0, 1e6, allow_nan=False)
counts = st.integers(0, 2**53 - 1)
layers = st.builds(
    LayerCost,
    name=st.text(max_size=8),
    forward_seconds=seconds,
    backward_seconds=seconds,
    optimizer_seconds=seconds,
    forward_error=seconds,
    kind_bytes=st.dictionaries(st.sampled_from(["master", "exp_avg"]), counts).map(
        lambda kinds: {"weight": 8, **kinds}
    ),
    activation_bytes=counts,
    output_bytes=counts,
    trained=st.booleans(),
)


@given(
    st.lists(layers, min_size=1, max_size=4),
    st.integers(1, 99),
    st.integers(1, 9),
    st.lists(st.floats(0.01, 10), min_size=1, max_size=4),
)
@settings(deadline=None)
def test_every_digit_comes_back(found: list[LayerCost], batch: int, micro: int, speeds: list[float]) -> None:
    one = Profile(layers=tuple(found), train_batch_size=batch, micro_batch_size=micro, speeds=tuple(speeds))
    assert Profile.from_json(one.to_json()) == one


def test_a_file(tmp_path: Path) -> None:
    one = profile((1.0, 2.0), speeds=(1.0, 0.5), source="by hand")
    one.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == one
    assert one.seconds("backward_seconds").tolist() == [2.0, 4.0]
    assert one.kind_bytes("master").tolist() == [400, 400] and one.kind_bytes("none").tolist() == [0, 0]
    assert one.counts("total_bytes").tolist() == [1400, 1400]


@pytest.mark.parametrize("cut", (0, 1, 10, 200, -2))
def test_a_file_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    (tmp_path / "profile.json").write_text(profile().to_json()[:cut])
    with pytest.raises(ProfileError, match=r"profile\.json: no JSON, or the end is missing"):
        Profile.load(tmp_path / "profile.json")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ProfileError, match=r"profile\.json"):
        Profile.load(tmp_path / "profile.json")


@pytest.mark.parametrize("value", (math.nan, -1.0, math.inf, -math.inf, "1", None, True))
@pytest.mark.parametrize("name", ("forward_seconds", "backward_seconds", "optimizer_seconds", "forward_error"))
def test_seconds_that_nobody_can_measure(name: str, value: Any) -> None:
    with pytest.raises(ProfileError, match=f"layer 'block.0': {name} is"):
        layer("block.0", **{name: value})
    said = json.loads(profile().to_json())
    said["layers"][3][name] = value
    with pytest.raises(ProfileError, match=f"layer 'block.3': {name} is"):
        Profile.from_json(json.dumps(said))


@pytest.mark.parametrize(
    ("change", "words"),
    (
        ({"version": 2}, "version is 2: Input should be 1"),
        ({"version": None}, "version is None"),
        ({"layers": []}, r"layers is \[\]: .* at least 1 item"),
        ({"layers": 3}, "layers is 3"),
        ({"layers": [3]}, "layer 3: it is 3"),
        ({"layers": [{"name": "a", "forward_seconds": 1}]}, "layer 'a': backward_seconds is missing"),
        ({"speeds": []}, r"speeds is \[\]: .* at least 1 item"),
        ({"speeds": [1, 0]}, r"speeds\.1 is 0: .* greater than 0"),
        ({"speeds": [1, math.nan]}, r"speeds\.1 is nan"),
        ({"train_batch_size": 0}, "train_batch_size is 0: Input should be greater than or equal to 1"),
        ({"micro_batch_size": 1.5}, "micro_batch_size is 1.5"),
        ({"other": 1}, "other is 1: Unexpected"),
    ),
)
def test_files_that_cannot_be(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        Profile.from_json(json.dumps({**json.loads(profile().to_json()), **change}))


@pytest.mark.parametrize(
    ("change", "words"),
    (
        ({"kind_bytes": {"master": 4}}, "kind_bytes has no 'weight'"),
        ({"kind_bytes": {"weight": -1}}, r"kind_bytes\.weight is -1"),
        ({"kind_bytes": 4}, "kind_bytes is 4"),
        ({"activation_bytes": 1.5}, "activation_bytes is 1.5"),
        ({"output_bytes": 2**53}, "output_bytes is"),
        ({"trained": 1}, "trained is 1"),
    ),
)
def test_layers_that_cannot_be(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        layer("block.0", **change)


def test_a_name_that_is_missing() -> None:
    said = json.loads(profile().to_json())
    del said["train_batch_size"]
    with pytest.raises(ProfileError, match="the profile: train_batch_size is missing"):
        Profile.from_json(json.dumps(said))
