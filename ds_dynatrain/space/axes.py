"""How the pipe, expert and tensor axes deal out logical tensors, before ZeRO cuts what is left on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space.cut import Cut, Shard, compose
from ds_dynatrain.space.layout import Layout
from ds_dynatrain.space.tensor import LogicalTensor


@dataclass(frozen=True)
class AxisCuts:
    """One logical tensor under one layout.

    stages: the pipeline stages that hold it, ascending; several for a tied weight. expert: how the expert axis cuts
    it, None if it belongs to no expert. tensor: how the tensor axis cuts it, None if all ranks of that axis hold the
    same, as they do of an expert: whatever places on the tensor axis the ranks of an expert index have.
    """

    stages: tuple[int, ...] = (0,)
    expert: Cut | None = None
    tensor: Cut | None = None

    def shard(self, shape: tuple[int, ...], pipe: int, expert: int, tensor: int) -> Shard:
        """What of a tensor of `shape` is at a place on the three axes; of shape (0,) where there is nothing."""
        if pipe not in self.stages:
            return NOTHING
        cuts = [(cut, index) for cut, index in ((self.expert, expert), (self.tensor, tensor)) if cut is not None]
        return compose(shape, cuts)


NOTHING = Shard((0,), ())
WHOLE = AxisCuts()

Partition = tuple[AxisCuts, ...]
"""One entry for each logical tensor, in the order of registration."""
Partitioner = Callable[[Layout], Partition]


def is_partitioned(layout: Layout) -> bool:
    """Whether ranks of the layout hold different parts of the model before ZeRO cuts anything."""
    return layout.pipe > 1 or layout.expert > 1 or layout.tensor > 1


def shared_stages(cuts: Iterable[AxisCuts]) -> tuple[tuple[int, ...], ...]:
    """The sets of stages that share a tensor."""
    return tuple(sorted({each.stages for each in cuts if len(each.stages) > 1}))


def check_partition(partition: Partition, tensors: Iterable[LogicalTensor], layout: Layout) -> None:
    """LayoutError, naming the tensor, for cuts that do not fit the sizes of the layout."""
    for tensor, cuts in zip(tensors, partition, strict=True):
        name = tensor.name
        if not cuts.stages or not all(0 <= stage < layout.pipe for stage in cuts.stages):
            raise LayoutError(
                f"{name!r} lies on stages {cuts.stages}, and {layout} has {layout.pipe}; give stages below "
                f"{layout.pipe}, or a larger pipe"
            )
        for axis in ("expert", "tensor"):
            cut, size = getattr(cuts, axis), getattr(layout, axis)
            if cut is not None and cut.count != size:
                raise LayoutError(
                    f"{name!r} is dealt out in {cut.count} by the {axis} axis, and {layout} has {size}; give "
                    f"{axis}={cut.count}"
                )
        if tensor.expert and cuts.tensor is not None and layout.tensor > 1:
            raise LayoutError(
                f"{name!r} belongs to experts and is cut by the tensor axis, too; {layout} has it whole: give tensor=1"
            )
