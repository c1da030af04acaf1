"""The Virtual Parameter Space of an engine: its logical tensors, the rules that cut them, and its state kinds."""

from __future__ import annotations

from ds_dynatrain.adapters.optimizers import moment_kinds
from ds_dynatrain.adapters.shaping import partition_of, rules_of
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.space import STATE, Layout, LogicalTensor, Partition, VirtualParameterSpace, standard_kinds


def space_of(
    engine: EngineCore, layout: Layout, members: tuple[int, ...], tensors: tuple[LogicalTensor, ...] | None = None
) -> VirtualParameterSpace:
    """Register every logical tensor. The rules that cut them come from DeepSpeed's own reading of the configuration.

    tensors: whole; by default those of the module, which must not be cut then.
    """
    tensors = tensors or engine.host.model_map.tensors
    names, shaper = tuple(tensor.name for tensor in tensors), engine.host.shaper
    types = engine.host.element_types
    moments, offloads = moment_kinds(engine.host.basic_optimizer, types), engine.deepspeed.zero_use_cpu_optimizer()
    there = [name for name, row in STATE.items() if row.is_gradient and (offloads or not row.is_offloaded)]
    gradients = {name: types.of(name).itemsize for name in there}
    kinds = standard_kinds(types.weight.itemsize, types.master.itemsize, moments, **gradients)

    def partition(target: Layout) -> Partition:
        return partition_of(shaper, names, target)

    return VirtualParameterSpace.of(tensors, rules_of(engine.host), kinds, layout, members, partition)
