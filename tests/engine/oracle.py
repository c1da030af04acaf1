"""All logical state of an engine, gathered the slow way from DeepSpeed's own fields. Shares no code with ds_dynatrain.

The arithmetic of DeepSpeed 0.19.8 as its sources have it: stages 1 and 2 lay an optimizer group's parameters end to
end (dealt out in turn under `round_robin_gradients`, each from a multiple of 16 bytes under `parameter_alignment`) and
cut the line into equal parts; stage 3 cuts each parameter into `ceil(numel / world)` and lays the parts of a
sub-group end to end. Every replica that a rank holds is read, and all must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as td
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

COUNTED_ON_ONE = ("FusedAdam", "FusedLion")
"""Optimizers that count on the last tensor of a group for all of it: `state['step'] += 1` after the loop over them."""
LAST_GRADIENT = "host_grad"
"""Under CPU offload a master's gradient is never cleared (stages 1 to 3); stage 0 has none to compare."""
Key = tuple[str, str]
"""(name of the parameter, "weight", "master", LAST_GRADIENT or the name of a per-element state of the optimizer)."""


@dataclass
class State:
    """Everything that a switch must not change: whole tensors, optimizer steps, hyper-parameters, counters, loss scale.

    scaling: the fields that the present optimizer has; stage 0 has no hysteresis, BF16_Optimizer none at all.
    """

    tensors: dict[Key, torch.Tensor]
    steps: dict[str, dict[str, float]]
    """Per parameter the optimizer's scalars, such as {"step": 3.0}; no entry where there are none."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    scaling: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a local parameter lies in a logical one: element i at row-major place `index[i]`, padding at -1.

    name, numel: of the logical tensor.
    """

    name: str
    index: torch.Tensor
    numel: int


Places = Callable[[Any], Mapping[str, Place]]
"""Of an engine, by the local parameters' names; those that are not named are whole."""


@dataclass(frozen=True)
class View:
    """A run of a logical tensor in this rank's memory, from row-major index `start`."""

    key: Key
    start: int
    flat: torch.Tensor


def gather(engine: Any, places: Places | None = None) -> State:
    """The state, whole, on every working rank; a collective of all of them.

    places: of a model that is dealt out by other axes than data. It must not come from the code under test.

    AssertionError for two replicas that differ, an element that nobody holds, or steps that differ.
    """
    where = _where(engine, places)
    mine = []
    for view in _views(engine):
        place = where[view.key[0]]
        index = place.index[view.start : view.start + view.flat.numel()]
        flat = view.flat.detach()[index >= 0].cpu()
        if flat.numel():
            as_bytes = flat.view(torch.uint8).numpy()  # pickles in a small part of the time that a tensor takes
            mine.append(((place.name, view.key[1]), _run(index[index >= 0]), as_bytes, flat.dtype))
    steps = {where[name].name: scalars for name, scalars in _steps(engine)}
    gathered: list[Any] = [None] * td.get_world_size()
    td.all_gather_object(gathered, (mine, steps, {place.name: place.numel for place in where.values()}))
    sizes = {name: numel for *_, numels in gathered for name, numel in numels.items()}
    tensors: dict[Key, torch.Tensor] = {}
    filled: dict[Key, torch.Tensor] = {}
    all_steps: dict[str, dict[str, float]] = {}
    for rank, (pieces, their_steps, _) in enumerate(gathered):
        for key, indices, as_bytes, dtype in pieces:
            run = indices if isinstance(indices, slice) else torch.from_numpy(indices)
            flat = torch.from_numpy(as_bytes).view(dtype)
            whole = tensors.setdefault(key, torch.zeros(sizes[key[0]], dtype=flat.dtype))
            seen = filled.setdefault(key, torch.zeros(sizes[key[0]], dtype=torch.bool))
            assert not (seen[run] & (_bits(whole[run]) != _bits(flat))).any(), f"{key}: rank {rank} holds another value"
            whole[run] = flat
            seen[run] = True
        for name, step in their_steps.items():
            assert all_steps.setdefault(name, step) == step, f"step of {name} differs on rank {rank}"
    for key, seen in filled.items():
        assert seen.all(), f"{key}: nobody holds {int((~seen).sum())} elements"
    groups = [_group(group) for group in engine.basic_optimizer.param_groups]
    counters = {name: getattr(engine, name) for name in ("global_steps", "global_samples", "skipped_steps")}
    return State(tensors, all_steps, groups, counters, _scaling(engine))


def _run(indices: torch.Tensor) -> Any:
    """Return indices as a slice where they are one run, which most are: it takes no time to send and to read."""
    first, last = int(indices[0]), int(indices[-1])
    is_run = last - first + 1 == len(indices) and bool((indices.diff() == 1).all())
    return slice(first, last + 1) if is_run else indices.numpy()


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Without the parameters; DeepSpeed names groups of experts after the number of ranks that share them."""
    kept = {name: value for name, value in group.items() if name != "params"}
    if str(kept.get("name")).startswith("ep_size_"):
        kept["name"] = "experts"
    return kept


def _where(engine: Any, places: Places | None) -> dict[str, Place]:
    """The place of every local parameter."""
    given = {} if places is None else dict(places(engine))
    sizes = {name: _numel(parameter) for name, parameter in engine.module.named_parameters()}
    return {name: given.get(name) or Place(name, torch.arange(numel), numel) for name, numel in sizes.items()}


def put(engine: Any, state: State, places: Places | None = None) -> None:
    """Write the tensors and steps of `state` into a working rank's memory; its engine must have moments."""
    where = _where(engine, places)
    with torch.no_grad():
        for view in _views(engine):
            place = where[view.key[0]]
            key = place.name, view.key[1]
            if key in state.tensors or key[1] != LAST_GRADIENT:
                index = place.index[view.start : view.start + view.flat.numel()]
                held = index >= 0
                view.flat[held] = state.tensors[key][index[held]].to(view.flat.device)
        for holder, names in _holders(engine):
            held = engine.basic_optimizer.state.get(holder, {})
            key = where[names[0]].name if names else next(iter(state.steps), "")
            for scalar, value in state.steps.get(key, {}).items():
                held[scalar] = torch.full_like(held[scalar], value) if torch.is_tensor(held[scalar]) else int(value)
    for name in _scaling(engine).keys() & state.scaling.keys():
        setattr(_scaler(engine), name, state.scaling[name])


def differences(one: State, other: State, counters: bool = True, last_gradients: bool = True) -> list[str]:
    """What is not bit-equal between two states, in words; nothing at all is the proof."""
    kept = [any(kind == LAST_GRADIENT for _, kind in side.tensors) for side in (one, other)]
    left_out = set() if last_gradients and all(kept) else {LAST_GRADIENT}
    mine, theirs = ({key for key in side.tensors if key[1] not in left_out} for side in (one, other))
    found = [f"{key} is held on one side only" for key in mine ^ theirs]
    for key in mine & theirs:
        unequal = int((_bits(one.tensors[key]) != _bits(other.tensors[key])).sum())
        if unequal:
            furthest = (one.tensors[key].double() - other.tensors[key].double()).abs().max().item()
            found.append(f"{key}: {unequal} of {one.tensors[key].numel()} elements differ, by {furthest:.1e} at most")
    for name in ("steps", "groups") + (("counters",) if counters else ()):
        if getattr(one, name) != getattr(other, name):
            found.append(f"{name}: {getattr(one, name)} and {getattr(other, name)}")
    for name in one.scaling.keys() & other.scaling.keys():
        if one.scaling[name] != other.scaling[name]:
            found.append(f"{name}: {one.scaling[name]} and {other.scaling[name]}")
    return sorted(found)


def _scaler(engine: Any) -> Any:
    """DeepSpeed's object with the loss scale, None where there is none."""
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _scaling(engine: Any) -> dict[str, float]:
    names = ("cur_scale", "cur_hysteresis")
    if engine.fp16_enabled() and engine.dynamic_loss_scale():
        names += ("cur_iter", "last_overflow_iter")
    scaler = _scaler(engine)
    return {name: float(getattr(scaler, name)) for name in names if getattr(scaler, name, None) is not None}


def _views(engine: Any) -> Iterator[View]:
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    stage = _stage(engine)
    if stage == 3:
        yield from _weights_in_parts(engine, names)
        yield from _stage3(engine, names)
        return
    for parameter in engine.module.parameters():
        yield View((names[id(parameter)], "weight"), 0, parameter.data.view(-1))
    if isinstance(engine.optimizer, FP16_Optimizer):
        for parameters, master in _flat_masters_of_stage0(engine):
            numels = [parameter.numel() for parameter in parameters]
            ends = torch.tensor(numels).cumsum(0).tolist()
            runs = [
                (names[id(p)], 0, end - numel, numel) for p, numel, end in zip(parameters, numels, ends, strict=True)
            ]
            yield from _with_moments(engine, master, runs)
        return
    if stage == 0:
        for parameter, master in _masters_of_stage0(engine):
            yield from _with_moments(engine, master, [(names[id(parameter)], 0, 0, master.numel())])
        return
    zero = engine.optimizer
    for group, (parameters, whole, master) in enumerate(_flat_groups(zero)):
        if id(parameters[0]) not in names:
            continue  # a group of which this pipeline stage has nothing
        peers = zero.real_dp_process_group[group]
        rank, world = td.get_rank(peers), td.get_world_size(peers)
        first, runs, covered = rank * master.numel(), [], torch.zeros(master.numel(), dtype=torch.bool)
        for position, parameter in _flat_order(zero, _in_order(engine, parameters, names), world):
            low, high = max(position, first), min(position + parameter.numel(), first + master.numel())
            if low < high:
                runs.append((names[id(parameter)], low - position, low - first, high - low))
                covered[low - first : high - first] = True
            place = (parameter.data_ptr() - whole.data_ptr()) // parameter.element_size()
            assert place == position, f"{names[id(parameter)]} lies at {place} of its flat buffer, not at {position}"
        moments = _moments(engine, master)
        moments.pop("exp_inf", None)  # Adamax adds its eps there
        steps_padding = type(engine.basic_optimizer).__name__ == "DeepSpeedCPULion"  # the sign of 0 is + to it
        for flat in (*(() if steps_padding else (master,)), *moments.values()):
            assert not flat.detach()[~covered].any(), f"padding of group {group} is not zero"
        yield from _with_moments(engine, master, runs)
        if _keeps_matrices(engine) and "momentum_buffer" in engine.basic_optimizer.state.get(master, {}):
            yield from _whole_momentum(engine, master, [name for name, *_ in runs])


def _stage(engine: Any) -> int:
    """The stage whose arithmetic counts: BF16_Optimizer cuts as stage 1 does, in a pipeline without ZeRO too."""
    return 1 if isinstance(engine.optimizer, BF16_Optimizer) else int(engine.zero_optimization_stage())


def _whole_momentum(engine: Any, master: torch.Tensor, touched: list[str]) -> Iterator[View]:
    """Muon in stages 1 and 2 (`stage_1_and_2.py` `get_flat_partition`): that of every matrix that the part touches."""
    flat, position = engine.basic_optimizer.state[master]["momentum_buffer"], 0
    numels = {name: parameter.numel() for name, parameter in engine.module.named_parameters()}
    for name in touched:
        yield View((name, "momentum_buffer"), 0, flat[position : position + numels[name]])
        position += numels[name]
    assert position == flat.numel(), f"{flat.numel()} elements of momentum for {position} of {touched}"


def _keeps_matrices(engine: Any) -> bool:
    return type(engine.basic_optimizer).__name__ == "MuonWithAuxAdam" and engine.zero_optimization_stage() in (1, 2)


def _flat_groups(zero: Any) -> list[tuple[list[Any], torch.Tensor, torch.Tensor]]:
    """(parameters, flat weights, this rank's part of the masters) per group of stages 1 and 2."""
    if isinstance(zero, BF16_Optimizer):
        for gradients in zero.fp32_groups_gradients_flat:
            assert not gradients.any(), "accumulated gradients are not zero between two steps"
        return list(zip(zero.bf16_groups, zero.bf16_groups_flat, zero.fp32_groups_flat_partition, strict=True))
    return list(zip(zero.bit16_groups, zero.bit16_groups_flat, zero.single_partition_of_fp32_groups, strict=True))


def _in_order(engine: Any, parameters: list[Any], names: dict[int, str]) -> Sequence[Any]:
    """As a tuple in the layout's own order of tensors, if it has one."""
    runs = getattr(getattr(engine, "layout", None), "order", None)  # DeepSpeed's own engine has no layout
    if runs is None:
        return parameters
    every = [tensor.name for tensor in engine._parts.vps.tensors]
    order = [every[number] for run in zip(runs[::2], runs[1::2], strict=True) for number in range(*run)]
    return tuple(sorted(parameters, key=lambda each: order.index(names[id(each)])))


def _flat_order(zero: Any, parameters: Sequence[Any], world: int) -> Iterator[tuple[int, Any]]:
    """(first element in the flat buffer, parameter) as `stage_1_and_2.py` lays out a group of stages 1 and 2."""
    deals = world if getattr(zero, "round_robin_gradients", False) and not isinstance(parameters, tuple) else 1
    piles = [parameters[deal::deals] for deal in range(deals)]
    position = 0
    for parameter in (parameter for pile in piles for parameter in pile):
        if getattr(zero, "parameter_alignment", False):
            while position * parameter.element_size() % 16:
                position += 1
        yield position, parameter
        position += parameter.numel()


def _weights_in_parts(engine: Any, names: dict[int, str]) -> Iterator[View]:
    for parameter in engine.module.parameters():
        key = names[id(parameter)], "weight"
        start, numel, _ = _part(parameter)
        yield View(key, start, parameter.ds_tensor.data[:numel])
        if parameter.ds_status == ZeroParamStatus.AVAILABLE:
            yield View(key, 0, parameter.data.view(-1))


def _stage3(engine: Any, names: dict[int, str]) -> Iterator[View]:
    zero = engine.optimizer
    for parameters, master in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        runs, position = [], 0
        for parameter in parameters:
            start, numel, size = _part(parameter)
            runs.append((names[id(parameter)], start, position, numel))
            position += size
        yield from _with_moments(engine, master, runs)


def _with_moments(engine: Any, master: torch.Tensor, runs: list[tuple[str, int, int, int]]) -> Iterator[View]:
    """runs: (name, first row-major index, offset in `master`, elements)."""
    flats = {"master": master, **_moments(engine, master)}
    if getattr(engine.optimizer, "cpu_offload", False) or getattr(engine.optimizer, "offload_optimizer", False):
        flats[LAST_GRADIENT] = master.grad
    for name, start, offset, numel in runs:
        for kind, flat in flats.items():
            yield View((name, kind), start, flat.detach().view(-1)[offset : offset + numel])


def _moments(engine: Any, master: torch.Tensor) -> dict[str, torch.Tensor]:
    held = engine.basic_optimizer.state.get(master, {})
    whole = {"momentum_buffer"} if _keeps_matrices(engine) else set()
    return {name: value for name, value in held.items() if _is_per_element(value, master) and name not in whole}


def _holders(engine: Any) -> Iterator[tuple[torch.Tensor, list[str]]]:
    """(tensor that the basic optimizer keeps a state for, names of the parameters in it).

    Without a name where a pipeline stage has nothing of a group: that tensor counts steps along, as all others do.
    """
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    zero, stage = engine.optimizer, _stage(engine)
    if isinstance(zero, FP16_Optimizer):
        pairs = _flat_masters_of_stage0(engine)
    elif stage == 0:
        pairs = [([parameter], master) for parameter, master in _masters_of_stage0(engine)]
        pairs += [([], element) for element in _of_no_tensor(engine)]
    elif stage == 3:
        pairs = list(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True))
    else:
        pairs = [(parameters, master) for parameters, _, master in _flat_groups(zero)]
    for parameters, holder in pairs:
        yield holder, [names[id(parameter)] for parameter in parameters if id(parameter) in names]


def _steps(engine: Any) -> Iterator[tuple[str, dict[str, float]]]:
    found: dict[str, dict[str, float]] = {}
    for holder, names in _holders(engine):
        state = engine.basic_optimizer.state.get(holder, {})
        scalars = {name: float(value) for name, value in state.items() if not (torch.is_tensor(value) and value.dim())}
        if scalars:
            found.update(dict.fromkeys(names, scalars))
    counter = getattr(engine.basic_optimizer, "aux_optimizer", None) or engine.basic_optimizer  # Muon's Adam
    if type(counter).__name__ in COUNTED_ON_ONE and engine.zero_optimization_stage() == 0:
        names_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        for group in engine.basic_optimizer.param_groups:
            held = [names_of[id(parameter)] for parameter in group["params"] if id(parameter) in names_of]
            counts = [found[name]["step"] for name in held if name in found]
            found.update({name: {"step": max(counts)} for name in held if name in found})
    yield from found.items()


def _is_per_element(value: Any, holder: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.dim() > 0 and value.shape == holder.shape


def _masters_of_stage0(engine: Any) -> list[tuple[Any, torch.Tensor]]:
    optimizer = engine.optimizer
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        return [pair for lows, highs in pairs for pair in zip(lows, highs, strict=True)]
    here = {id(parameter) for parameter in engine.module.parameters()}  # others are on other stages of a pipeline
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in listed if parameter.numel() and id(parameter) in here]
    return [(parameter, parameter) for parameter in trained]


def _of_no_tensor(engine: Any) -> list[torch.Tensor]:
    """What stands at stage 0 for groups that this pipeline stage has nothing of."""
    known = {id(master) for _, master in _masters_of_stage0(engine)}
    listed = [parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"]]
    return [each for each in listed if each in engine.basic_optimizer.state and id(each) not in known]


def _flat_masters_of_stage0(engine: Any) -> list[tuple[list[Any], torch.Tensor]]:
    """`FP16_Optimizer` flattens each group in its order, without padding, and steps the flat tensor."""
    return list(zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups_flat, strict=True))


def _part(parameter: Any) -> tuple[int, int, int]:
    """(first index, elements, elements with padding) of this rank's part of a parameter under stage 3."""
    peers, numel = parameter.ds_process_group, parameter.ds_numel
    size = -(-numel // td.get_world_size(peers))
    start = min(td.get_rank(peers) * size, numel)
    return start, min(size, numel - start), size


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
