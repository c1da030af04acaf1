"""Models whose parameters are not whole when `initialize` is called: they come in one by one.

A model of `deepspeed.zero.Init` is cut over all processes of the launch, idle ones too; so may be one that an engine
has trained at stage 3 and left. Its parameters are gathered one after the other, each working member copies what its
pieces of the first layout need into buffers that were made for them, and the engine is then put together over these
buffers, without memory of its own, as on a member that wakes. So a member never holds more than its shard of the
first layout and one whole parameter.

Parameters on the meta device are drawn, one module after the other (see `meta`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as td
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from ds_dynatrain.adapters.device import HOST, compute_device
from ds_dynatrain.adapters.launch_world import LaunchWorld
from ds_dynatrain.adapters.meta import ParamInit, draw, drawing_modules, refuse_meta_buffers, refuse_undrawable, swap_in
from ds_dynatrain.adapters.no_alloc import stand_in
from ds_dynatrain.adapters.process_groups import is_known, is_ours
from ds_dynatrain.adapters.stage3 import forget_module, forget_parameter, reset_counters
from ds_dynatrain.adapters.state import Buffers
from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.space import MASTER, WEIGHT, BufferId, Layout, VirtualParameterSpace

WHOLE, PART, META = "whole", "zero.Init", "meta"
Row = tuple[str, list[int], str, str, bool]
"""(name, shape, type, whether it is whole, whether it requires a gradient)."""
Place = tuple[int, int, BufferId, int]
"""(first row-major index, elements, buffer, offset in it)."""


@dataclass
class Incoming:
    """The parameters of a model, in the module's order, before its engine is built.

    forms, types: how each parameter comes in, and its element type, by its id. owners: which process has its value,
    where that is not process 0. held: what this process holds of it (its part, or the whole); emptied as they come in.
    place: which part of each this process has.
    """

    model: nn.Module
    shapes: dict[int, tuple[int, ...]]
    forms: dict[int, str]
    types: dict[int, torch.dtype]
    param_init_fn: ParamInit | None = None
    owners: Mapping[int, int] = field(default_factory=dict)
    held: dict[int, torch.Tensor] = field(default_factory=dict)
    place: int = 0

    @staticmethod
    def look(
        model: nn.Module,
        launch: LaunchWorld,
        param_init_fn: ParamInit | None = None,
        owners: Mapping[int, int] | None = None,
        joins: bool = False,
    ) -> Incoming:
        """Read a model without changing it; UnsupportedError, naming the parameter, for what cannot come in.

        owners: by a parameter's id the process that has its value, where that is not process 0. joins: whether all
        values come from a job that runs.
        """
        if partition_parameters.top_level_context is not None:
            raise UnsupportedError(
                "initialize was called inside of `with deepspeed.zero.Init(...)`; call it after that block"
            )
        refuse_meta_buffers(model)
        if not joins:
            refuse_undrawable(model, param_init_fn)
        shapes, forms, types, place = {}, {}, {}, 0
        each: Any
        for name, each in model.named_parameters():
            is_part = hasattr(each, "ds_id")
            if is_part:
                _refuse_part(name, each, launch)
                place = each.ds_process_group.rank()
            shapes[id(each)] = tuple(each.ds_shape if is_part else each.shape)
            forms[id(each)] = PART if is_part else META if each.is_meta else WHOLE
            types[id(each)] = each.dtype
        return Incoming(model, shapes, forms, types, param_init_fn, owners or {}, place=place)

    @property
    def draws(self) -> bool:
        """Whether members draw parameters for themselves."""
        return META in self.forms.values()

    @property
    def is_whole(self) -> bool:
        """Whether every parameter is whole already, as DeepSpeed's own constructor wants it."""
        return set(self.forms.values()) <= {WHOLE}

    def rows(self) -> list[Row]:
        """What must be equal on all processes, plain JSON."""
        return [
            (name, list(self.shapes[id(each)]), str(each.dtype), self.forms[id(each)], each.requires_grad)
            for name, each in self.model.named_parameters()
        ]

    def take_apart(self, config: DeepSpeedConfig) -> None:
        """Take what `zero.Init` and this model hold of parameters off the module.

        Each parameter then has its shape, the type that the configuration gives it, and no memory. ConfigError, naming
        the parameter, for one that was cut in another type than the configuration says.
        """
        wanted = _configured_dtype(config)
        for name, parameter in self.model.named_parameters():
            if wanted is None and self.forms[id(parameter)] == PART and parameter.dtype != torch.float32:
                raise ConfigError(
                    f"{name!r} was built as {parameter.dtype} under deepspeed.zero.Init and the configuration says "
                    "float32: give zero.Init the same configuration (config_dict_or_path=...)"
                )
        each: Any
        for each in list(self.model.parameters()):
            form, dtype = self.forms[id(each)], each.dtype
            if form != META:
                self.held[id(each)] = each.ds_tensor.data if form == PART else each.data
            if form == PART:
                forget_parameter(each)
            dtype = wanted if wanted is not None and dtype.is_floating_point else dtype
            outline = stand_in(self.shapes[id(each)], dtype, compute_device())
            if form == META:
                swap_in(each, outline)
            else:
                each.data = outline
        for module in self.model.modules():
            forget_module(module)
        reset_counters()

    def values(self, launch: LaunchWorld, job_seed: int, works: bool) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter with its whole value, flat, one at a time; a collective of all processes of the launch.

        A parameter that is whole on every process has its owner's value, member 0's as a rule, as in DeepSpeed. What is
        on the meta device is drawn on members that work.
        """
        places = self._places(launch)
        for each in self.model.parameters():
            if self.forms[id(each)] == META:
                continue
            mine = self.held.pop(id(each))
            if self.forms[id(each)] == PART:
                mine = _gathered(mine, launch, places)[: math.prod(self.shapes[id(each)])]
            elif launch.size > 1:
                mine = mine.reshape(-1).to(HOST, copy=True)  # the memory may be the user's, and lies anywhere
                td.broadcast(mine.view(torch.uint8), self.owners.get(id(each), 0), group=launch.group)
            yield each, mine.reshape(-1)
        if works:
            yield from self._draws(job_seed)

    def _places(self, launch: LaunchWorld) -> list[int]:
        """Which process has each part, where there are any: an engine's ranks are not always those of the launch."""
        if PART not in self.forms.values():
            return []
        parts = torch.empty(launch.size, dtype=torch.int64)
        td.all_gather(list(parts.split(1)), torch.tensor([self.place]), group=launch.group)
        return parts.argsort().tolist()

    def is_drawn(self, parameter: nn.Parameter) -> bool:
        """Whether each member draws the parameter for itself."""
        return self.forms[id(parameter)] == META

    def _draws(self, job_seed: int) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        meta = {key for key, form in self.forms.items() if form == META}
        for name, module, own in drawing_modules(self.model, meta):
            yield from draw(f"{job_seed} {name}", module, own, self.types, self.param_init_fn)


def fill(
    buffers: Buffers,
    vps: VirtualParameterSpace,
    rank: int,
    incoming: Iterator[tuple[nn.Parameter, torch.Tensor]],
    numbers: dict[int, int],
) -> None:
    """Copy the pieces that `rank` holds of each parameter's weight and master out of its whole value.

    numbers: id of a parameter -> its tensor number. A master is made from the weight in the weight's own type.
    """
    wanted = {kind: pieces_by_tensor(vps, vps.layout, rank, kind) for kind in (WEIGHT, MASTER)}
    dtype = next(held.dtype for (kind, _), held in buffers.items() if kind == WEIGHT)
    for parameter, value in incoming:
        value = value.to(dtype)  # not the parameter's own type: it may be the one that it was drawn in
        for kind, rows in wanted.items():
            for first, numel, name, offset in rows.get(numbers[id(parameter)], ()):
                buffers[kind, name].narrow(0, offset, numel).copy_(value.narrow(0, first, numel))


def pieces_by_tensor(
    vps: VirtualParameterSpace, layout: Layout, rank: int, kind: str, owned: bool = False
) -> dict[int, list[Place]]:
    """Where the pieces of each tensor (or those of them that the rank owns) lie on a rank, by the tensor's number."""
    found: dict[int, list[Place]] = {}
    numbers, pieces = vps.split_by_tensor((vps.owned if owned else vps.holding)(layout, rank, kind))
    for number, piece in zip(numbers.tolist(), pieces, strict=True):
        first = piece.start - int(vps.bases[number])
        found.setdefault(number, []).append((first, piece.stop - piece.start, piece.buffer, piece.offset))
    return found


def _gathered(part: torch.Tensor, launch: LaunchWorld, places: list[int]) -> torch.Tensor:
    """The parts of all processes end to end, with the padding of the last. places: the process of each part."""
    part = part.to("cpu").contiguous()
    whole = torch.empty(launch.size, part.numel(), dtype=part.dtype)
    rows = dict(zip(places, whole.view(torch.uint8).unbind(0), strict=True))
    td.all_gather([rows[process] for process in range(launch.size)], part.view(torch.uint8), group=launch.group)
    return whole.view(-1)


def refuse_cut(model: nn.Module, beside: bool) -> None:
    """UnsupportedError, naming the parameter, for a model that is cut over others than those that start a job together.

    beside: whether this process has an engine already; the group that all started in is gone then.
    """
    each: Any
    for name, each in model.named_parameters():
        if not hasattr(each, "ds_id") or not _is_left(each):
            continue
        if is_ours(each.ds_process_group):
            raise UnsupportedError(
                f"{name!r} is cut: an engine has trained it at ZeRO stage 3, and has ended. In a job whose members "
                "come and go switch to stage 0, 1 or 2 before engine.destroy(), or build the model anew"
            )
        if not beside:
            raise UnsupportedError(
                f"{name!r} was built under deepspeed.zero.Init, over the world of this node alone: in a job whose "
                "members come and go call ds_dynatrain.init_distributed() first, then deepspeed.zero.Init by this name"
            )


def _is_left(each: Any) -> bool:
    """Whether what has cut a parameter is an engine of ours that has ended: its groups are gone."""
    return not is_known(each.ds_process_group)


def _refuse_part(name: str, each: Any, launch: LaunchWorld) -> None:
    """UnsupportedError for a parameter that is cut otherwise than over the launch, and for what `zero.Init` does
    besides.
    """
    if _is_left(each):
        ranks = each.ds_process_group.size()
        if ranks != launch.size:
            raise UnsupportedError(
                f"{name!r} is cut over {ranks} of the {launch.size} processes of the launch: an engine has trained it "
                "at ZeRO stage 3, and has ended. Switch to stage 0, 1 or 2, or to as many data ranks as there are "
                "processes, before engine.destroy(); or build the model anew and load a checkpoint"
            )
        return
    if td.get_process_group_ranks(each.ds_process_group) != list(range(launch.size)):
        raise UnsupportedError(
            f"{name!r} was cut by deepspeed.zero.Init over a group of its own; leave data_parallel_group out of "
            "deepspeed.zero.Init"
        )
    if each.nvme_swapper is not None:
        raise UnsupportedError(
            f"{name!r} lies on NVMe (zero.Init, remote_device); give zero.Init remote_device='cpu', or leave it out"
        )
    if each.ds_secondary_tensor is not None or each.ds_zero_param_process_group is not None:
        raise UnsupportedError(
            f"{name!r} has a second copy (zero_optimization.zero_hpz_partition_size); leave that key out"
        )
    if hasattr(each.ds_tensor, "ds_quant_scale"):
        raise UnsupportedError(f"{name!r} is quantized (zero_optimization.zero_quantized_weights); leave that key out")
    if each.ds_status != ZeroParamStatus.NOT_AVAILABLE and not each.ds_persist:
        raise UnsupportedError(f"{name!r} is gathered now; end the `with GatheredParameters` block before initialize")


def _configured_dtype(config: DeepSpeedConfig) -> torch.dtype | None:
    """The type that DeepSpeed casts a model's parameters to; None where it leaves them as they are."""
    if config.bfloat16_config.enabled:
        return torch.bfloat16
    return torch.float16 if config.float16_config.enabled else None
