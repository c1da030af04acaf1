"""Arithmetic whose results do not depend on how many ranks do it: sums, norms, and seeds of random streams.

`sums` is the one order in which leaves of a global batch are added, `squares` a sum of squares that has no order,
`seeds` what generators are set to. Nothing here knows of ranks, messages or DeepSpeed.
"""

from ds_dynatrain.exact.seeds import leaf_seed, sample_seed
from ds_dynatrain.exact.squares import Grid, largest, square_sums
from ds_dynatrain.exact.sums import MicroStep, level_of, levels_of, pairwise_sum, rest_of

__all__ = [
    "Grid",
    "MicroStep",
    "largest",
    "leaf_seed",
    "level_of",
    "levels_of",
    "pairwise_sum",
    "rest_of",
    "sample_seed",
    "square_sums",
]
