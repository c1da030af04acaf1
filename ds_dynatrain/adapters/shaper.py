"""What a shaper answers: how one way that DeepSpeed has of dealing a model out follows a layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from ds_dynatrain.adapters.children import Made
from ds_dynatrain.errors import LayoutError
from ds_dynatrain.space import AxisCuts, Layout, is_partitioned


class Shaper:
    """What one way of dealing models out has to answer. No call is a collective, and none needs a full-size tensor.

    This one is of models that are dealt out by data and sequence only. owners: which process of the launch has the
    first value of a parameter, by its id; process 0 of those left out.
    """

    owners: Mapping[int, int] = MappingProxyType({})

    def cuts(self, layout: Layout) -> Mapping[str, AxisCuts]:
        """How each logical tensor is dealt out under a layout, by its name; of any layout, installed or not.

        LayoutError, with the arithmetic and the nearest valid size, for a layout that the model cannot take;
        UnsupportedError naming the parameter that DeepSpeed does not describe.
        """
        raise LayoutError(f"{layout}: this model has no axis but data and sequence; set the other axes to 1")

    def whole(self, root: nn.Module) -> nn.Module:
        """A module with all layers of the model, of which the root may have some; without memory."""
        return root

    def refuse_to_train(self, names: Collection[str]) -> None:
        """SwitchRefused, naming it, for a tensor that is to be trained from now on and cannot be in every layout."""

    def make(self, layout: Layout, rank: int) -> Made | None:
        """The children of a rank under `layout`, ahead of `reshape`; None if it makes them in the root itself.

        In any thread and whatever world is installed; it changes nothing that training uses.
        """
        return None

    def reshape(self, root: nn.Module, layout: Layout, made: Made | None = None) -> None:
        """Give the root the children of this rank under `layout`, whose world is installed.

        made: by `make` for this rank, used up by this; made now if None. Every parameter is a new one of its local
        shape. Children are replaced, never changed: a switch that fails puts the old ones back.
        """
        if is_partitioned(layout):
            self.cuts(layout)

    def parameters(self, root: nn.Module, layout: Layout) -> dict[str, nn.Parameter]:
        """The parameters of a root that has the shape of `layout` on this rank, by the names of the logical tensors."""
        return dict(root.named_parameters())

    def enter(self, engine: Any, layout: Layout) -> None:
        """Set what DeepSpeed's constructor would have set in the engine for these axes, after `reshape`."""

    def leave(self, engine: Any) -> None:
        """Take off what `enter` has set, and let go of the groups of its world."""

    def configure(self, config: dict[str, Any], layout: Layout) -> None:
        """Write the sizes of a layout into DeepSpeed's configuration, in place."""
