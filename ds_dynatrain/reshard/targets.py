"""Target layouts of switches: whether a layout is possible, which member gets which rank, and how much memory is
needed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ds_dynatrain.adapters.deepspeed.support_checks import refuse_module, refuse_moved_states
from ds_dynatrain.adapters.groups.device import HOST, compute_device, training_bytes
from ds_dynatrain.adapters.model.pipeline_layers import is_pipeline
from ds_dynatrain.adapters.zero.optimizers import refuse_optimizer_layout
from ds_dynatrain.adapters.zero.optimizers import rule_of as optimizer_rule_of
from ds_dynatrain.adapters.zero.regroup import refuse_changes
from ds_dynatrain.adapters.zero.state import bucket_bytes, working_bytes
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.membership.destinations import growing, rule_of
from ds_dynatrain.plan import Assignment, assign_slots, nearest
from ds_dynatrain.reshard import feasible
from ds_dynatrain.reshard.carry import refuse_tensor_settings
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.process import PROCESS, refuse_target
from ds_dynatrain.space import Layout
from ds_dynatrain.support import Target, refuse_layout, usage


class Targets:
    """Checks of the layouts to which one engine may switch.

    rule: yields the layouts to consider for n members in an elastic job.
    """

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.rule = rule_of(engine.settings.raw_layouts, self._best)

    def _best(self, members: int, present: Layout) -> Iterator[Layout]:
        """Yield possible layouts for a number of members, best first.

        An extension ranks them; without one, layouts with the largest data axis come first.

        present: the current layout.
        """
        found = (extension.best_layouts(members) for extension in self.engine.job.extensions)
        yield from next((layouts for layouts in found if layouts is not None), growing(members, present))

    def step_ms(self, target: Layout, members: Sequence[int]) -> dict[str, float]:
        """Return the step time in a layout as predicted by an extension: milliseconds, keyed by part of the step.
        Returns {} if no extension predicts it.

        members: the member at each rank.
        """
        return next(filter(None, (each.step_ms(target, members) for each in self.engine.job.extensions)), {})

    def checked(self, layout: Layout | None, changes: Mapping[str, Any]) -> Layout:
        """Return the layout that the arguments of a call describe. Raises SwitchRefused if the engine cannot switch to
        it.

        layout: the layout, if it is given as a whole.
        changes: the axes to change in the current layout otherwise.
        """
        engine = self.engine
        target = feasible.target_layout(engine.layout, layout, changes)
        refuse_target(target, engine.layout, len(PROCESS.membership.able(engine)))
        self.check(target, len(engine.candidates.nodes))
        return target

    def check(self, target: Layout, processes: int) -> None:
        """Raise SwitchRefused if the model cannot be trained in a layout by this number of processes."""
        engine, host, job = self.engine, self.engine.host, self.engine.job
        refuse_moved_states(host)
        if not engine.idle:
            refuse_changes(host)
            refuse_tensor_settings(engine)
        feasible.check_combination(job.features, target, processes)  # first: other refusals keep its axes
        feasible.check_size(target, processes)
        feasible.check_batch(target, job.batch_sizes, host.shaper.whole(host.module), job.has_stages)
        for extension in job.extensions:
            extension.check_layout(target, job.batch_sizes, job.has_stages)
        feasible.check_tensors(engine.vps, target)
        refuse_module(host.module, target, job.user_config)
        refuse_layout(Target(job.user_config, target, engine.layout, type(host.basic_optimizer)))
        refuse_optimizer_layout(host.basic_optimizer, job.user_config, target, engine.layout)
        try:
            engine.config_for(target)
        except Exception as error:  # DeepSpeed checks some keys against the stage, with whatever exception
            reason = f"DeepSpeed does not take this configuration in {target}: {type(error).__name__}: {error}"
            raise SwitchRefused(reason, "choose another stage, or change the key that it names") from error

    def check_late(self, target: Layout) -> None:
        """Raise SwitchRefused if this engine does not support a late switch (optimizer state moves after the pause) to
        a layout."""
        engine = self.engine
        if engine.is_lean:
            raise usage("late lean switches").refused()
        if PROCESS.is_shared:
            raise usage("late switches beside another engine").refused()
        wide = [layout for layout in (engine.layout, target) if layout.world_size > layout.data]
        if wide or is_pipeline(engine.host.module):
            raise usage("late switches of other axes").refused(f"a late switch of {wide[0] if wide else 'a pipeline'}")
        if optimizer_rule_of(engine.host.basic_optimizer).whole_tensors:
            raise usage("late switches with Muon").refused()
        if not engine.train_loaders:
            raise usage("late switches without a loader").refused()

    def placed(self, target: Layout, without: tuple[int, ...] = (), late: bool = False) -> tuple[Layout, Assignment]:
        """Assign members to the ranks of a layout. Return the layout, with its order of tensors, and the assignment.

        Raises SwitchRefused if there are too few members, or too little memory on this node.

        without: members that must not get a rank.
        late: whether the switch is late (optimizer state moves after the pause).
        """
        pool, engine = self.engine.candidates, self.engine
        able = tuple(member for member in PROCESS.membership.able(engine) if member not in without)
        if len(able) < target.world_size:
            raise SwitchRefused(
                f"{target} has {target.world_size} ranks, and {len(able)} members may take one",
                f"choose a layout of at most {len(able)} ranks",
            )
        target, found = self.assigned(target, able, pool.nodes)
        feasible.check_memory(engine.control.member, needs(engine, target, found.members, pool.nodes, late), pool.nodes)
        return target, found

    def assigned(self, target: Layout, able: tuple[int, ...], nodes: Mapping[int, str]) -> tuple[Layout, Assignment]:
        """Assign some of the given members to the ranks of a layout. Return the layout, with its order of tensors, and
        the assignment.

        able: the members that may get a rank.
        nodes: the node of each member.
        """
        if self.engine.settings.owners == "nearest":
            return nearest(self.engine.vps, target, able, nodes)
        target = target.replace(order=None)
        return target, assign_slots(self.engine.vps, target, able, nodes)


def needs(
    engine: EngineCore, target: Layout, members: tuple[int, ...], nodes: Mapping[int, str], late: bool = False
) -> feasible.Needs:
    """Return how many bytes each member on this node allocates in a switch: target buffers and staging, less the source
    buffers if they are released first.

    members: the member at each rank of the target.
    nodes: the node of each member.
    late: whether to add the memory used for training, because in a late switch both states are held while a global
        batch is trained. The usage of this member so far is assumed for all members, which is safe because each member
        checks only its own entry.
    """
    beside = Counter({compute_device().type: training_bytes()} if late else {})
    vps, budget = engine.vps, engine.settings.memory_budget_bytes
    differ = any(kind.overlaps(layout) for kind in vps.kinds for layout in (target, vps.layout))
    known: dict[tuple[Layout, int, int], Counter[str]] = {}

    def held(layout: Layout, rank: int) -> Counter[str]:
        local = vps.local(layout, rank)
        alike = layout, id(local.line), local.zero_rank if differ else 0  # ranks with the same line need the same bytes
        if alike in known:
            return known[alike]
        memory, state = engine.memory_in(layout), Counter[str]()
        for (kind, _), size in local.sizes().items():
            state[memory[kind].place.device.type] += size * memory[kind].dtype.itemsize
        state[compute_device().type] += bucket_bytes(engine.deepspeed, layout.zero_stage)
        if engine.deepspeed.zero_use_cpu_optimizer():
            accumulates = engine.batch_for(layout).accumulation > 1
            state[HOST.type] += working_bytes(local, memory["weight"].dtype, accumulates)
        known[alike] = state
        return state

    found: dict[tuple[int, str], int] = {}
    for rank, member in enumerate(members):
        if nodes[member] != nodes[engine.control.member]:
            continue
        size = held(target, rank) + beside
        is_freed = engine.is_lean and member in vps.members
        freed = held(vps.layout, vps.members.index(member)) if is_freed else Counter[str]()
        for device in {*size, HOST.type}:
            staged = min(budget, size.total()) if device == HOST.type else 0  # messages pass through host memory
            found[member, device] = max(0, size[device] - freed[device]) + staged
    return found


class NodeMemory:
    """Check that a node has enough memory for all engines of its processes in a change of members.

    The first call of `check` computes the sum, and later calls reuse it, so that memory that engines allocate in the
    meantime is not counted twice. Each engine calls `check` in a thread of its own.

    member: this member's number.
    needs: for each engine, a function that returns the bytes that each member needs.
    nodes: the node of each member.
    """

    def __init__(self, member: int, needs: Sequence[Callable[[], feasible.Needs]], nodes: Mapping[int, str]) -> None:
        self._member, self._needs, self._nodes = member, needs, nodes
        self._lock = threading.Lock()
        self._is_known = False
        self._refusal: SwitchRefused | None = None

    def check(self) -> None:
        """Raise SwitchRefused if the node has too little memory for all engines together. Each engine that calls this
        gets the same result."""
        with self._lock:
            if not self._is_known:
                together = Counter[tuple[int, str]]()
                for needs in self._needs:
                    together.update(needs())
                try:
                    feasible.check_memory(self._member, together, self._nodes)
                except SwitchRefused as refusal:
                    self._refusal = refusal
                self._is_known = True
        if self._refusal is not None:
            raise self._refusal
