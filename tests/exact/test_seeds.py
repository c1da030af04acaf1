"""Seeds: each place has its own, the same wherever it is computed."""

from __future__ import annotations

import itertools

from ds_dynatrain.space.leaves import leaf_seed, sample_seed


def test_each_place_has_its_own() -> None:
    places = itertools.product((0, 1, 2**40), ("torch", "numpy"), range(5), range(5), range(2))
    seeds = [leaf_seed(*place) for place in places] + [
        sample_seed(*each) for each in itertools.product(range(5), repeat=3)
    ]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_they_stay_what_they_are() -> None:
    """A checkpoint goes on with them in another process, and in another version."""
    assert leaf_seed(7, "torch", 3, 2) == 5546353026608138343
    assert sample_seed(0, 1, 5) == 7947520530641596019
