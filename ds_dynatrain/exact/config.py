"""The `exact` block of a configuration."""

from __future__ import annotations

from ds_dynatrain.config import Block, Steps


class ExactConfig(Block):
    """A job whose losses, gradient norms, weights and moments have the same bits in any world."""

    digest_every_steps: Steps = 1
    """Steps, counted from the start of the job, between two digests of weights, moments and losses."""
