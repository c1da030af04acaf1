"""Models whose parameters are not whole when `initialize` is called; their values arrive one parameter at a time.

A model built under `deepspeed.zero.Init` is partitioned over all processes of the launch, idle ones included. A model
that an engine has trained at stage 3 may be partitioned too. Its parameters are gathered one after the other, and each
working member copies its shard of the first layout into buffers made for the shard. The engine is then built over these
buffers without allocating memory of its own, as on a member that stops being idle. A member thus never holds more than
its shard of the first layout and one whole parameter.

Parameters on the meta device are initialized module by module, with the same values on every member. A module's own
parameters are given memory, its `reset_parameters()` is called (as torch's FSDP does) under a seed derived from the
job's seed and the module's name, and only the member's shard of the values is kept.

`deepspeed.zero.Init` partitions each parameter over all processes as soon as its module is built. In a launch whose
members may join and leave, the processes are known only once this process belongs to the job, and a process that joins
a running job has no peers to partition with, because the others are training. The first call of `zero.Init` therefore
brings the process into the job. Processes that start the job partition parameters over all of them, as in a fixed
launch. In a process that joins later, parameters go to the meta device: they are not initialized, and values that a
loader copies into them are ignored, because their values come from the other members.
"""

from __future__ import annotations

import hashlib
import math
import random
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.distributed as td
from deepspeed import zero
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from torch import nn

from ds_dynatrain.adapters.groups.device import HOST, compute_device
from ds_dynatrain.adapters.groups.process_groups import is_known, is_ours
from ds_dynatrain.adapters.groups.worlds import LaunchWorld
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.adapters.zero.deepspeed_config import SIZES
from ds_dynatrain.adapters.zero.no_alloc import stand_in
from ds_dynatrain.adapters.zero.process_wide import capture, restore, seed_accelerator
from ds_dynatrain.adapters.zero.stages import forget_module, forget_parameter, reset_counters
from ds_dynatrain.adapters.zero.state import Buffers
from ds_dynatrain.errors import ConfigError, UnsupportedError
from ds_dynatrain.space import MASTER, WEIGHT, BufferId, Layout, VirtualParameterSpace

ParamInit = Callable[[nn.Module], object]
WAY_OUT = "give its class a `reset_parameters()`, or pass `param_init_fn=` to initialize"


def drawing_modules(model: nn.Module, meta: Collection[int]) -> list[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Return (name, module, parameters) for each module that has parameters of its own to initialize.

    meta: ids of the parameters that are, or were, on the meta device.

    A shared parameter is listed once.
    """
    found, taken = [], set[int]()
    for name, module in model.named_modules():
        own = [held for held in module.parameters(recurse=False) if id(held) in meta and id(held) not in taken]
        if own:
            taken.update(id(held) for held in own)
            found.append((name, module, own))
    return found


def refuse_undrawable(model: nn.Module, param_init_fn: ParamInit | None) -> None:
    """Raise UnsupportedError, naming the parameter, if a parameter on the meta device cannot be initialized."""
    meta = {id(held): name for name, held in model.named_parameters() if held.is_meta}
    for _, module, own in drawing_modules(model, meta):
        title = meta[id(own[0])]
        if param_init_fn is None and not callable(getattr(module, "reset_parameters", None)):
            raise UnsupportedError(
                f"{title!r} is on the meta device, and {type(module).__name__} has no reset_parameters: {WAY_OUT}"
            )
        real = [key for key, held in module.named_parameters(recurse=False) if not held.is_meta]
        if real:
            raise UnsupportedError(
                f"{title!r} is on the meta device and {real[0]!r} beside it is not: make both real, or none"
            )


def swap_in(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Replace a parameter's data with a tensor that may be on another device.

    The parameter object, to which optimizers and modules refer, stays the same.
    """
    other = nn.Parameter(data, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)


def draw(
    seed: str,
    module: nn.Module,
    own: list[nn.Parameter],
    types: dict[int, torch.dtype],
    init: ParamInit | None,
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Initialize a module's parameters, and yield each parameter in `own` with its flat value.

    seed: string that determines the random values.
    types: a map from a parameter's id to the element type of its value.
    init: function to call instead of the module's `reset_parameters`.

    The memory is released at the end. Raises UnsupportedError if the module does not set one of the parameters.
    """
    stand_ins = [(held, held.data) for held in module.parameters(recurse=False)]
    try:
        for held, stand_in in stand_ins:
            value = torch.empty(stand_in.shape, dtype=types.get(id(held), stand_in.dtype), device=stand_in.device)
            held.data = value.fill_(torch.nan) if value.is_floating_point() else value.zero_()
        with seeded(f"meta {seed}"), torch.no_grad():
            module.reset_parameters() if init is None else init(module)  # type: ignore[operator]
        titles = {id(held): key for key, held in module.named_parameters(recurse=False)}
        for held in own:
            value = held.data.reshape(-1)
            if value.is_floating_point() and value.isnan().any():
                raise UnsupportedError(
                    f"initialize: {titles[id(held)]!r} of {type(module).__name__} is on the meta device and was not "
                    f"set; {WAY_OUT}"
                )
            yield held, value
    finally:
        for held, stand_in in stand_ins:
            held.data = stand_in


@contextmanager
def seeded(what: str) -> Iterator[None]:
    """Context manager that seeds the default random generators, and restores their state at the end.

    These are the generators of torch, the accelerator, numpy and Python. Generators of other devices are left alone.

    what: string that determines the seed.
    """
    seed = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little") >> 1
    before = capture()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds all devices
    seed_accelerator(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        restore(before)


WHOLE, PART, META = "whole", "zero.Init", "meta"
Row = tuple[str, list[int], str, str, bool]
"""Description of a parameter: (name, shape, element type, how the parameter arrives, whether it requires a gradient).

A parameter arrives in one of three ways: `WHOLE`, `PART` or `META`.
"""
Place = tuple[int, int, BufferId, int]
"""Where a piece of a tensor lies: (first row-major index, number of elements, buffer, offset in the buffer)."""


class Incoming:
    """The parameters of a model, in the module's order, before its engine is built.

    rows: descriptions of the parameters, as plain JSON. They must be equal on all processes.
    forms: a map from each parameter's id to how the parameter arrives.
    types: a map from each parameter's id to its element type.
    owners: a map from a parameter's id to the process that has its value; process 0 if not listed.
    held: a map from each parameter's id to this process's part of it, or to the whole parameter; emptied as values are
        yielded.
    place: index of the part that this process has of each parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        launch: LaunchWorld,
        param_init_fn: ParamInit | None = None,
        owners: Mapping[int, int] | None = None,
        joins: bool = False,
    ) -> None:
        """Read a model without changing it.

        joins: whether all values come from a running job.

        Raises UnsupportedError, naming the parameter or buffer, if the model cannot be taken over.
        """
        if partition_parameters.top_level_context is not None:
            raise UnsupportedError(
                "initialize was called inside of `with deepspeed.zero.Init(...)`; call it after that block"
            )
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise UnsupportedError(
                    f"buffer {name!r} is on the meta device: make it real before initialize (a rotary table, running "
                    "statistics)"
                )
        if not joins:
            refuse_undrawable(model, param_init_fn)
        self.model, self.launch, self.param_init_fn = model, launch, param_init_fn
        self.owners, self.place = owners or {}, 0
        self.held: dict[int, torch.Tensor] = {}
        self.forms: dict[int, str] = {}
        self.types: dict[int, torch.dtype] = {}
        self.rows: list[Row] = []
        each: Any
        for name, each in model.named_parameters():
            is_part = hasattr(each, "ds_id")
            if is_part:
                _refuse_part(name, each, launch)
                self.place = each.ds_process_group.rank()
            form, shape = PART if is_part else META if each.is_meta else WHOLE, each.ds_shape if is_part else each.shape
            self.forms[id(each)], self.types[id(each)] = form, each.dtype
            self.rows.append((name, list(shape), str(each.dtype), form, each.requires_grad))

    @property
    def draws(self) -> bool:
        """Whether some parameters have no values yet and are initialized by each member itself."""
        return META in self.forms.values()

    @property
    def is_whole(self) -> bool:
        """Whether every parameter is already whole, which DeepSpeed's own constructor requires."""
        return set(self.forms.values()) <= {WHOLE}

    def take_apart(self, config: DeepSpeedConfig) -> None:
        """Detach the parameters' data from the module, whether `zero.Init` or the model holds it.

        Afterwards each parameter has its shape, its configured element type, and no memory. Raises ConfigError, naming
        the parameter, if a parameter was partitioned in a type other than the configured one.
        """
        wanted = torch.float16 if config.float16_config.enabled else None
        wanted = torch.bfloat16 if config.bfloat16_config.enabled else wanted
        for name, _, dtype, form, _ in self.rows:
            if wanted is None and form == PART and dtype != str(torch.float32):
                raise ConfigError(
                    f"{name!r} was built as {dtype} under deepspeed.zero.Init and the configuration says float32: give "
                    "zero.Init the same configuration (config_dict_or_path=...)"
                )
        each: Any
        for (_, shape, _, form, _), each in zip(self.rows, list(self.model.parameters()), strict=True):
            outline = stand_in(shape, wanted if wanted and each.is_floating_point() else each.dtype, compute_device())
            if form == META:
                swap_in(each, outline)
                continue
            self.held[id(each)] = each.ds_tensor.data if form == PART else each.data
            if form == PART:
                forget_parameter(each)
            each.data = outline
        for module in self.model.modules():
            forget_module(module)
        reset_counters()

    def values(self, job_seed: int, works: bool) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter with its whole flat value, one at a time. A collective of all processes of the launch.

        A parameter that is whole on every process gets its owner's value, normally that of member 0, as in DeepSpeed.
        Parameters on the meta device are initialized, and yielded only if this member works.
        """
        launch, places = self.launch, self._places()
        for (_, shape, _, form, _), each in zip(self.rows, self.model.parameters(), strict=True):
            if form == META:
                continue
            mine = self.held.pop(id(each))
            if form == PART:
                mine = _gathered(mine, launch, places)[: math.prod(shape)]
            elif launch.size > 1:
                mine = mine.reshape(-1).to(HOST, copy=True)  # the user may own the memory, on any device
                td.broadcast(mine.view(torch.uint8), self.owners.get(id(each), 0), group=launch.group)
            yield each, mine.reshape(-1)
        if works:
            meta = {key for key, form in self.forms.items() if form == META}
            for name, module, own in drawing_modules(self.model, meta):
                yield from draw(f"{job_seed} {name}", module, own, self.types, self.param_init_fn)

    def _places(self) -> list[int]:
        """Return the number of the process that has each part; [] if no parameter is partitioned.

        The parts of an engine's model are numbered by the engine's ranks, which need not be the ranks of the launch.
        """
        if PART not in self.forms.values():
            return []
        parts = torch.empty(self.launch.size, dtype=torch.int64)
        td.all_gather(list(parts.split(1)), torch.tensor([self.place]), group=self.launch.group)
        return parts.argsort().tolist()

    def is_drawn(self, parameter: nn.Parameter) -> bool:
        """Return whether each member initializes the parameter itself."""
        return self.forms[id(parameter)] == META


def fill(
    buffers: Buffers,
    vps: VirtualParameterSpace,
    rank: int,
    incoming: Iterator[tuple[nn.Parameter, torch.Tensor]],
    numbers: dict[int, int],
) -> None:
    """Fill a rank's buffers: copy its shard of each parameter's weight and master from the parameter's whole value.

    buffers: the buffers of `rank`.
    incoming: pairs of a parameter and its whole value.
    numbers: a map from a parameter's id to its tensor's number.

    A master is made from the value in the weight's element type.
    """
    wanted = {kind: pieces_by_tensor(vps, vps.layout, rank, kind) for kind in (WEIGHT, MASTER)}
    dtype = next(held.dtype for (kind, _), held in buffers.items() if kind == WEIGHT)
    for parameter, value in incoming:
        value = value.to(dtype)  # the parameter may still have the type in which it was initialized
        for kind, rows in wanted.items():
            for first, numel, name, offset in rows.get(numbers[id(parameter)], ()):
                buffers[kind, name].narrow(0, offset, numel).copy_(value.narrow(0, first, numel))


def pieces_by_tensor(
    vps: VirtualParameterSpace, layout: Layout, rank: int, kind: str, owned: bool = False
) -> dict[int, list[Place]]:
    """Return a map from tensor number to where the tensor's pieces lie on a rank.

    owned: whether to include only the pieces that the rank owns.
    """
    found: dict[int, list[Place]] = {}
    numbers, pieces = vps.split_by_tensor((vps.owned if owned else vps.holding)(layout, rank, kind))
    for number, piece in zip(numbers.tolist(), pieces, strict=True):
        first = piece.start - int(vps.bases[number])
        found.setdefault(number, []).append((first, piece.stop - piece.start, piece.buffer, piece.offset))
    return found


def _gathered(part: torch.Tensor, launch: LaunchWorld, places: list[int]) -> torch.Tensor:
    """Return the parts of all processes as one tensor, including the padding at the end of the last part.

    places: the number of the process that has each part.
    """
    part = part.to("cpu").contiguous()
    whole = torch.empty(launch.size, part.numel(), dtype=part.dtype)
    rows = dict(zip(places, whole.view(torch.uint8).unbind(0), strict=True))
    td.all_gather([rows[process] for process in range(launch.size)], part.view(torch.uint8), group=launch.group)
    return whole.view(-1)


def refuse_cut(model: nn.Module, beside: bool) -> None:
    """Raise UnsupportedError, naming the parameter, if one is not partitioned over the processes that start the job.

    beside: whether this process already has an engine, in which case the group of all starting processes is gone.
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
    """Return whether a parameter is still partitioned over groups of an earlier engine, which no longer exist."""
    return not is_known(each.ds_process_group)


def _refuse_part(name: str, each: Any, launch: LaunchWorld) -> None:
    """Raise UnsupportedError if a parameter is not partitioned over the launch, or uses an unsupported `zero.Init`."""
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


class ElasticInit(Init):  # type: ignore[misc]
    """Replacement for `deepspeed.zero.Init` that first brings this process into the job. It takes the same arguments.

    `install_zero_init` derives the class that is actually used, which adds `join` and `read`.
    """

    join: Callable[[], bool]
    read: Callable[[Any], dict[str, Any]]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.is_newcomer = type(self).join()
        given = signature(Init.__init__).bind(self, *arguments, **named)
        for name in ("config_dict_or_path", "config"):
            if given.arguments.get(name) is not None:
                own = type(self).read(given.arguments[name])
                kept = {key: value for key, value in own.items() if key not in SIZES}
                # DeepSpeed checks the sizes against the number of processes, though `zero.Init` has no use for them
                given.arguments[name] = kept | {"train_micro_batch_size_per_gpu": 1}
        self._leaves_undrawn = ExitStack()
        super().__init__(*given.args[1:], **given.kwargs)

    def __enter__(self) -> None:
        super().__enter__()
        if self.is_newcomer and self.enabled:
            self._leaves_undrawn.enter_context(_without_init())

    def __exit__(self, *raised: Any) -> Any:
        self._leaves_undrawn.close()
        return super().__exit__(*raised)

    def _post_init_method(self, module: nn.Module) -> None:
        if not self.is_newcomer:
            super()._post_init_method(module)
            return
        _drop(module.parameters(recurse=False))
        with replaced(module, _parameters={}):  # DeepSpeed then handles only the buffers
            super()._post_init_method(module)

    def _convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        if self.is_newcomer:
            _drop(param_list)
        else:
            super()._convert_to_zero_parameters(param_list)


def install_zero_init(join: Callable[[], bool], read: Callable[[Any], dict[str, Any]]) -> None:
    """Replace `deepspeed.zero.Init` with our class. DeepSpeed's engines keep the original.

    join: function called before each use. It brings this process into the job, and returns whether the process joins a
        running job.
    read: function that returns a configuration as a dictionary.
    """
    zero.Init = type("Init", (ElasticInit,), {"join": staticmethod(join), "read": staticmethod(read)})
    warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter", UserWarning)


def _drop(parameters: Iterable[nn.Parameter]) -> None:
    """Move parameters to the meta device, which discards their values. The parameter objects stay the same."""
    for each in parameters:
        if not each.is_meta:
            swap_in(each, each.data.to("meta"))


@contextmanager
def _without_init() -> Iterator[None]:
    """Context manager in which functions of `torch.nn.init` do not change parameters.

    If code keeps a reference to such a function inside the block, the function works normally after the block.
    """
    is_open = True

    def instead_of(fill: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fill)
        def leave(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            return tensor if is_open and isinstance(tensor, nn.Parameter) else fill(tensor, *arguments, **named)

        return leave

    fills = {name: fill for name, fill in vars(nn.init).items() if name.endswith("_") and not name.startswith("_")}
    with replaced(nn.init, **{name: instead_of(fill) for name, fill in fills.items()}):
        yield
    is_open = False
