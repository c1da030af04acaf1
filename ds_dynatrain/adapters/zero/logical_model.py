"""The logical tensors of a user's module and optimizer groups, and the parameters behind them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from ds_dynatrain.errors import UnsupportedError
from ds_dynatrain.space import FROZEN, LogicalTensor

Parameters = tuple[nn.Parameter, ...]


@dataclass(frozen=True, eq=False)
class ModelMap:
    """The assignment of parameters to logical tensors.

    tensors: the logical tensors in the order of registration: group 0's trainable ones, group 1's, ..., then the frozen
        ones.
    parameters: the parameter of each tensor. The objects live as long as the engine; their data is replaced.
    groups: the parameters of each group of the user's optimizer, trainable or not.
    requires_grad: whether each parameter required a gradient when it was registered. A parameter in no group counts as
        frozen.
    dtype: the element type of all parameters.
    """

    tensors: tuple[LogicalTensor, ...]
    parameters: Parameters
    groups: tuple[Parameters, ...]
    requires_grad: tuple[bool, ...]
    dtype: torch.dtype

    @staticmethod
    def of(module: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> ModelMap:
        """Return the map of a module whose parameters are whole.

        groups: the parameters of the module's optimizer groups.

        A parameter that several modules share is one logical tensor, under its first name. Raises UnsupportedError,
        naming the parameter or group, if a switch cannot transfer it.
        """
        names = {parameter: name for name, parameter in module.named_parameters()}
        held: dict[nn.Parameter, int] = {}
        for number, group in enumerate(groups):
            trainable = [parameter for parameter in group if parameter.requires_grad]
            if not trainable:
                raise UnsupportedError(f"optimizer group {number} has no trainable parameter; remove the group")
            held.update(dict.fromkeys(trainable, number))
        stray = next((parameter for parameter in held if parameter not in names), None)
        if stray is not None:
            raise UnsupportedError(
                f"optimizer group {held[stray]} holds a parameter of shape {tuple(stray.shape)} that is not in the "
                "model; register it in a module"
            )
        held = {**held, **{parameter: FROZEN for parameter in names if parameter not in held}}
        tensors = [  # DeepSpeed marks experts by `allreduce`
            LogicalTensor(names[each], tuple(each.shape), number, not getattr(each, "allreduce", True))
            for each, number in held.items()
        ]
        flags = tuple(parameter.requires_grad for parameter in held)
        types = {parameter.dtype: name for parameter, name in names.items()}
        if len(types) != 1:
            found = ", ".join(f"{name!r} is {dtype}" for dtype, name in types.items()) or "it has none"
            raise UnsupportedError(
                f"the parameters of the model must have one type, and {found}; give all parameters one type "
                "(`keep_in_fp32_modules` is not supported yet)"
            )
        return ModelMap(tuple(tensors), tuple(held), tuple(map(tuple, groups)), flags, next(iter(types)))

    def reshaped(self, parameters: Mapping[str, nn.Parameter], tensors: Sequence[LogicalTensor]) -> ModelMap:
        """Return the map of the same model in another shape.

        parameters: the parameters in the new shape, keyed by the logical tensors' names.
        tensors: this rank's local tensors.

        If a tensor without elements has no parameter, it gets an empty one. Raises UnsupportedError if a parameter is
        missing or its shape differs from that of its tensor.
        """
        held: list[nn.Parameter] = []
        for before, tensor in zip(self.parameters, tensors, strict=True):
            parameter = parameters.get(tensor.name)
            if tensor.numel and (parameter is None or tuple(parameter.shape) != tensor.shape):
                found = "is not in the rebuilt module" if parameter is None else f"is {tuple(parameter.shape)} there"
                raise UnsupportedError(
                    f"{tensor.name!r} is {tensor.shape} by the layout, and {found}; give parameters the names and "
                    "shapes that the model had at initialize"
                )
            if parameter is None:
                nothing = torch.empty(0, dtype=self.dtype, device=before.device)
                parameter = nn.Parameter(nothing, requires_grad=before.requires_grad)
                marks = {"allreduce", "group_name"} & before.__dict__.keys()  # for groups of experts
                parameter.__dict__.update({name: before.__dict__[name] for name in marks})
            parameter.requires_grad_(before.requires_grad)
            held.append(parameter)
        groups = tuple(tuple(held[self.numbers[id(each)]] for each in group) for group in self.groups)
        return ModelMap(tuple(tensors), tuple(held), groups, self.requires_grad, self.dtype)

    def regrouped(self, groups: Sequence[Sequence[str]], requires_grad: Collection[str]) -> ModelMap:
        """Return the map of the same parameters in other optimizer groups.

        groups: names of the tensors in each group.
        requires_grad: names of the parameters that require a gradient from now on. Their `requires_grad` is not set
            here.

        Frozen tensors keep their order.
        """
        number = {tensor.name: at for at, tensor in enumerate(self.tensors)}
        trained = [(number[name], group) for group, listed in enumerate(groups) for name in listed]
        trained = [(at, group) for at, group in trained if self.tensors[at].name in requires_grad]
        others = set(range(len(self.tensors))).difference(at for at, _ in trained)
        order = [*trained, *((at, FROZEN) for at in sorted(others))]
        return ModelMap(
            tuple(replace(self.tensors[at], group=group) for at, group in order),
            tuple(self.parameters[at] for at, _ in order),
            tuple(tuple(self.parameters[number[name]] for name in listed) for listed in groups),
            tuple(self.tensors[at].name in requires_grad for at, _ in order),
            self.dtype,
        )

    @cached_property
    def numbers(self) -> dict[int, int]:
        """Map from each parameter's id to the number of its tensor."""
        return {id(held): number for number, held in enumerate(self.parameters)}

    @property
    def group_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the tensors in each group."""
        return tuple(tuple(self.tensors[self.numbers[id(held)]].name for held in group) for group in self.groups)

    @cached_property
    def trainable(self) -> int:
        """Number of trainable tensors, which come first in `tensors`."""
        return sum(tensor.group != FROZEN for tensor in self.tensors)

    def drop_data(self) -> None:
        """Remove the data and the gradients of all parameters."""
        for parameter in self.parameters:
            parameter.grad = None
            parameter.data = torch.empty(0, dtype=self.dtype, device=parameter.device)

    def frozen(self) -> list[tuple[int, nn.Parameter]]:
        """Return (number, parameter) for each frozen tensor."""
        return list(enumerate(self.parameters))[self.trainable :]
