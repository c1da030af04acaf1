"""Thin forwarders: `initialize` hands these out once, and they speak for whatever DeepSpeed has at present."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction
from typing import Any

import torch

from ds_dynatrain.adapters.host import Host


class OptimizerForwarder(torch.optim.Optimizer):
    """The optimizer of the present world, in one object for the whole job.

    Its methods and attributes are those of `engine.optimizer`, which is DeepSpeed's own object and another one after a
    switch; what that has not are those of the torch optimizer underneath. What is set and neither has (a tag of the
    user's, what a scheduler puts in place of `step`) is kept here.
    """

    def __init__(self, host: Host) -> None:
        self.__dict__["_host"] = host  # torch's own constructor would take groups, and keep them

    @property
    def current(self) -> Any:
        """DeepSpeed's present optimizer object."""
        return self._host.optimizer

    @property
    def basic(self) -> torch.optim.Optimizer:
        """The torch optimizer underneath: one object for the whole job."""
        return self._host.basic_optimizer  # type: ignore[no-any-return]

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, for gradients beyond fp16; false where the present optimizer skips none.

        It is there in every layout and on idle members: who asks once whether it is there goes by that for ever.
        """
        return bool(getattr(self.current, "overflow", False))

    @property
    def _opt_called(self) -> bool:
        """What torch's schedulers ask before their first step: `engine.step` has taken one of the optimizer's."""
        return bool(self._host.engine.global_steps)

    @_opt_called.setter
    def _opt_called(self, value: bool) -> None:
        """They set it, too, where a script calls `step` itself."""

    def __getattr__(self, name: str) -> Any:
        if name == "_host":  # of a copy that has none
            raise AttributeError(name)
        return getattr(self.current if hasattr(self.current, name) else self.basic, name)

    def __setattr__(self, name: str, value: Any) -> None:
        holders = [held for held in (self.current, self.basic) if hasattr(held, name)]
        if name in vars(self) or hasattr(type(self), name) or not holders:
            object.__setattr__(self, name, value)
        else:
            setattr(holders[0], name, value)

    def __repr__(self) -> str:
        return f"OptimizerForwarder({self.current!r})"


def _method(name: str) -> Callable[..., Any]:
    def call(self: OptimizerForwarder, *arguments: Any, **named: Any) -> Any:
        return getattr(self.current, name)(*arguments, **named)

    call.__name__ = name
    return call


for _name, _own in vars(torch.optim.Optimizer).items():
    if isfunction(_own) and not _name.startswith("_"):
        setattr(OptimizerForwarder, _name, _method(_name))
