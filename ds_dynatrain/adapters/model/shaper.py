"""Building blocks with which a model follows a layout: templates without storage, new children for a root, the shaper.

A template's parameters are on the meta device. Its buffers are real copies, because a buffer such as a rotary table is
made by a constructor, is in no checkpoint, and could not be made again. A change of layout gives the root module other
children. The root itself stays, and with it every reference to the root.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, MethodType
from typing import Any

import torch
import torch.distributed as td
from torch import nn

from ds_dynatrain.adapters.groups.device import HOST, compute_device
from ds_dynatrain.adapters.zero.no_alloc import stand_in
from ds_dynatrain.errors import LayoutError, UnsupportedError
from ds_dynatrain.space import AxisCuts, Layout, is_partitioned

ModelFactory = Callable[[], nn.Module]
Cuts = Mapping[str, AxisCuts]
"""A map from the name of each logical tensor to how a layout cuts it."""
Lists = Sequence[list[nn.Parameter]]
"""The caller's lists of a model's parameters, such as those of an optimizer's groups."""
WAY_OUT = "pass `model_factory=`, a function that builds the model anew"

HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)
"""Names of the hooks that a module calls in a step. Templates leave these hooks out, because a hook may hold any
object, even an engine."""


def template_of(module: nn.Module, factory: ModelFactory | None = None) -> nn.Module:
    """Return the template of a module that DeepSpeed has not altered, except perhaps by `zero.Init`.

    The template is never trained, and no other object holds it. Tied parameters stay tied, a module that occurs twice
    is one object, and the parameters' own attributes (such as DeepSpeed's flags for optimizers) are kept. Hooks that a
    step calls are left out.

    factory: builds the module anew if it cannot be copied.

    Raises UnsupportedError, naming the part, if the module cannot be copied or the factory builds another module.
    """
    if factory is None:
        return copied(module)
    made = factory()
    wanted, found = _shapes(module), _shapes(made)
    different = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if different:
        name = different[0]
        raise UnsupportedError(
            f"initialize(model_factory=...) builds another model: {name!r} is {found.get(name)} in it and "
            f"{wanted.get(name)} in the one that initialize was given; build the same model in both"
        )
    return copied(made)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(held, "ds_shape", held.shape)) for name, held in module.named_parameters()}


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module with parameters on the meta device and real buffers. See `template_of`."""
    memo: dict[int, Any] = {}
    for name, held in module.named_parameters():
        if type(held) is not nn.Parameter:
            kind = type(held).__name__
            raise UnsupportedError(f"parameter {name!r} is a {kind}, not a plain nn.Parameter; {WAY_OUT}")
        shape = getattr(held, "ds_shape", held.shape)
        made = nn.Parameter(torch.empty(shape, dtype=held.dtype, device="meta"), requires_grad=held.requires_grad)
        own = {key: value for key, value in held.__dict__.items() if not callable(value) and not key.startswith("ds_")}
        made.__dict__.update(own)
        memo[id(held)] = made
    for part in module.modules():
        memo.update({id(table): type(table)() for key in HOOKS if (table := part.__dict__.get(key)) is not None})
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise UnsupportedError(
            f"a template of {type(module).__name__} cannot be made: {_culprit(module, memo)} cannot be copied "
            f"({type(error).__name__}: {error}); {WAY_OUT}"
        ) from error


def _culprit(module: nn.Module, memo: dict[int, Any]) -> str:
    """Return a description of the innermost part of a module that cannot be copied."""
    for name, part in reversed(list(module.named_modules())):
        for key, value in part.__dict__.items():
            if key != "_modules":
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    return f"{key!r} of {name or 'the model'!r} ({type(part).__name__})"
    return "the model"


@dataclass(frozen=True, eq=False)
class Made:
    """New children for a root module.

    module: a module on the meta device whose children they are.
    on_root: attributes to set on the root.
    """

    module: nn.Module
    on_root: Mapping[str, Any] = field(default_factory=dict)


def with_memory(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give every parameter on the meta device uninitialized memory of type `dtype`.

    Tied parameters stay tied. A parameter keeps its flags and attributes, but not its hooks. On the host, untouched
    memory costs no time and occupies no pages. An accelerator's memory is not written either.
    """
    device = compute_device()

    def memory(held: nn.Parameter) -> torch.Tensor:
        return torch.empty(held.shape, dtype=dtype) if device == HOST else stand_in(held.shape, dtype, device)

    return _replace_parameters(module, memory)


def without_memory(module: nn.Module) -> nn.Module:
    """Give every parameter its shape over a single element of memory, because its values are held elsewhere.

    Tied parameters stay tied.
    """
    return _replace_parameters(module, lambda held: stand_in(held.shape, held.dtype, compute_device()))


def _replace_parameters(module: nn.Module, memory: Callable[[nn.Parameter], torch.Tensor]) -> nn.Module:
    """Replace each parameter with a new one over the tensor `memory(parameter)`. Attributes set on the parameter are
    kept.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, held in part._parameters.items():
            if held is None:
                continue
            if id(held) not in made:
                made[id(held)] = nn.Parameter(memory(held), requires_grad=held.requires_grad)
                made[id(held)].__dict__.update(held.__dict__)
            part._parameters[name] = made[id(held)]
    return module


def pass_hooks_on(old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
    """Give new modules the hooks that users put on the old modules of the same names.

    Both modules share one table of hooks, so the handle that removes a hook works for both. A hook that is a method of
    an old module becomes the same method of the new module.
    """
    heirs = {id(part): new[name] for name, part in old.items() if name in new}
    for name, part in old.items():
        for table in HOOKS:
            hooks = part.__dict__.get(table)
            if hooks and name in new:
                moved = {key: _moved(hook, heirs) for key, hook in hooks.items()}
                same = all(moved[key] is hook for key, hook in hooks.items())
                new[name].__dict__[table] = hooks if same else type(hooks)(moved)


def _moved(hook: Any, heirs: Mapping[int, nn.Module]) -> Any:
    if isinstance(hook, MethodType) and id(hook.__self__) in heirs:
        return MethodType(hook.__func__, heirs[id(hook.__self__)])
    return hook


class Shaper:
    """A strategy for distributing a model over ranks. No method is a collective, and none needs a full-size tensor.

    This base class serves models that only the data and sequence axes distribute.

    owners: a map from a parameter's id to the launch process that holds its initial value; process 0 if not listed.
    """

    owners: Mapping[int, int] = MappingProxyType({})
    autoep: Any = None
    """The `Conversion` of a model whose layers with experts are AutoEP's; otherwise None."""

    def cuts(self, layout: Layout) -> Cuts:
        """Return a map from each logical tensor's name to how a layout, installed or not, distributes the tensor.

        Raises LayoutError, with the arithmetic and the nearest valid size, if the model cannot have the layout. Raises
        UnsupportedError, naming the parameter, if DeepSpeed does not describe a parameter.
        """
        raise LayoutError(f"{layout}: this model has no axis but data and sequence; set the other axes to 1")

    def whole(self, root: nn.Module) -> nn.Module:
        """Return a module with all layers of the model, without storage. The root may have some of the layers only."""
        return root

    def refuse_to_train(self, names: Collection[str]) -> None:
        """Raise SwitchRefused if one of these tensors cannot be trained in every layout. The error names the tensor."""

    def make(self, layout: Layout, rank: int) -> Made | None:
        """Build the children of a rank under `layout`, ahead of `reshape`; None if `reshape` builds them itself.

        May be called in any thread, whichever world is installed. Changes no object that training uses.
        """
        return None

    def reshape(self, root: nn.Module, layout: Layout, made: Made | None = None) -> None:
        """Give the root the children of this rank under `layout`, whose world must be installed.

        made: the result of `make` for this rank, which this call uses up; None to make it now.

        Every parameter is a new one of its local shape, over uninitialized memory; buffers are the template's. Children
        are replaced, never changed, so a switch that fails puts the old ones back.
        """
        made = made or self.make(layout, td.get_rank())
        if made is None:
            if is_partitioned(layout):
                self.cuts(layout)
            return
        with_memory(made.module, next(root.parameters()).dtype)
        root._modules, root._parameters = made.module._modules, made.module._parameters
        root.__dict__.update(made.on_root)

    def enter(self, engine: Any, layout: Layout) -> None:
        """Set what DeepSpeed's constructor would have set in the engine for these axes. Called after `reshape`."""

    def leave(self, engine: Any) -> None:
        """Remove from the engine what `enter` has set, and release the process groups of its world."""

    def configure(self, config: dict[str, Any], layout: Layout) -> None:
        """Write the sizes of a layout into DeepSpeed's configuration, in place."""
