"""Pipelines of layers that take a known processor time in each pass."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from tools.burning import Burning


def burning(seconds: Sequence[float]) -> PipelineModule:
    """Layers of these forward seconds, and twice as many backward."""
    return PipelineModule([LayerSpec(Burning, each, 2 * each) for each in seconds], num_stages=1, loss_fn=nn.MSELoss())
