"""Making an engine in the first world of its process, or without a world on a member that is idle."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ds_dynatrain.adapters.incoming import Incoming
from ds_dynatrain.adapters.pipeline import is_pipeline
from ds_dynatrain.adapters.settings import layout_config
from ds_dynatrain.adapters.shaper import Shaper
from ds_dynatrain.adapters.start import engine_around
from ds_dynatrain.adapters.world import World
from ds_dynatrain.adapters.worlds import WorldSpec, build_world, drop, install, installed, stand_in_world
from ds_dynatrain.elastic.process import at_exit
from ds_dynatrain.engine.context import Context
from ds_dynatrain.engine.ending import open_for_work
from ds_dynatrain.engine.engine import DynatrainEngine
from ds_dynatrain.engine.feasible import dealt
from ds_dynatrain.engine.first import take_in
from ds_dynatrain.engine.first_layout import check_axes, check_start
from ds_dynatrain.engine.groups import OwnGroups
from ds_dynatrain.engine.job import Job
from ds_dynatrain.engine.members.entry import Entry
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.pipeline import DynatrainPipelineEngine
from ds_dynatrain.engine.space import space_of
from ds_dynatrain.space import Layout, is_partitioned

Ties = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Construction:
    """All that an engine is made of. arguments: of DeepSpeed's constructor; layout: that the job is in."""

    job: Job
    entry: Entry
    context: Context
    layout: Layout
    arguments: dict[str, Any]
    incoming: Incoming
    shaper: Shaper

    def make(self) -> DynatrainEngine:
        """The engine, ready for work; where it raises nothing of it is left."""
        given, ties = self._arguments()
        engine = self._working(given, ties) if self.entry.mine in self._members else self._idle(given, ties)
        space = space_of(engine._parts, self.layout, self._members)
        if self.entry.joins:
            self.incoming.held.clear()
        elif not given["whole"]:
            with self._unmade(engine):
                take_in(engine._parts, self.incoming, space)
        open_for_work(engine._parts, space)
        for extension in self.job.extensions:
            engine.on_change(extension.on_change)
            if hasattr(extension, "state_dict"):
                engine.register_for_checkpointing(extension.name, extension)
        self._settle(engine._parts)
        at_exit(_close, weakref.ref(engine))
        return engine

    @property
    def _members(self) -> tuple[int, ...]:
        """Those that work."""
        record = self.entry.record
        return tuple(range(self.layout.world_size)) if record is None else tuple(record["members"])

    def _arguments(self) -> tuple[dict[str, Any], Ties]:
        """(the engine's arguments, the sets of stages that share a tensor)."""
        job, layout = self.job, self.layout
        check_start(layout, self.arguments["model"], self.shaper, job, max(self.entry.size, layout.world_size))
        ties = check_axes(self.shaper, layout) if is_partitioned(layout) else ()
        config = copy.deepcopy(job.user_config)
        uncut = layout.replace(data=layout.data * layout.tensor, tensor=1)  # AutoTP's layers come with the first shape
        self.shaper.configure(config, uncut)
        whole = self.incoming.is_whole and not is_partitioned(layout)
        settings = layout_config(config, layout, dealt(job.batch_sizes, layout, job.has_stages))
        if not whole:
            self.incoming.take_apart(settings[1])
        given = {"settings": settings, "job": job, "context": self.context, "layout": layout}
        given |= {"members": self._members, "whole": whole, "shaper": self.shaper}
        return {**given, **self.arguments}, ties

    def _working(self, given: dict[str, Any], ties: Ties) -> DynatrainEngine:
        job, entry, members = self.job, self.entry, self._members
        with entry.building() as note:
            status = entry.membership.new_status()
            of_all = OwnGroups(each.group for each in job.extensions if each.group)
            own = of_all.kinds(self.layout, members, {}, entry.mine)
            sides = entry.mine, members, members, self.layout, ties
            spec = WorldSpec(1, *sides, own, job.number, job.has_sequence)
            world = build_world(entry.background.store, spec, job.settings.timeout_seconds, status, note=note)
        try:
            world.connect(job.settings.timeout_seconds, stop=entry.stop)
            install(world)
            return _engine_in(world, world, given)
        except BaseException:
            entry.launch.install()
            drop(world, is_broken=True).join(job.settings.timeout_seconds)  # who was refused may ask again at once
            raise

    def _idle(self, given: dict[str, Any], ties: Ties) -> DynatrainEngine:
        stand_in = stand_in_world(0, self.layout, ties)
        with installed(stand_in, self.entry.launch):
            engine = _engine_in(None, stand_in, given)
        engine._host.leave_world()
        return engine

    @contextmanager
    def _unmade(self, engine: DynatrainEngine) -> Iterator[None]:
        """If what is inside raises, nothing of the engine is left."""
        try:
            yield
        except BaseException:
            engine._host.let_module_go()
            self.entry.launch.install()
            if engine._parts.world is not None:
                drop(engine._parts.world).join(self.job.settings.timeout_seconds)
            raise

    def _settle(self, engine: EngineParts) -> None:
        """Where a group has served that all who start together stood in: each stands alone while it is idle."""
        entry = self.entry
        if entry.world is None or entry.alone is None or entry.joins:
            return
        engine.context = replace(engine.context, launch=entry.alone)
        if engine.idle:
            entry.alone.install()
        engine.control.track_teardown(entry.launch.retire())
        entry.membership.begin(entry.world, engine.members)


def _engine_in(world: World | None, groups: World, arguments: dict[str, Any]) -> DynatrainEngine:
    """Return an engine of the class that the model needs, and extensions make of it.

    groups: of the world that is installed, which is a stand-in on an idle member.
    """
    has_stages = is_pipeline(arguments["model"])
    kind: type[DynatrainEngine] = DynatrainPipelineEngine if has_stages else DynatrainEngine
    for extension in arguments["job"].extensions:
        kind = extension.engine_class(kind)
    given = {"groups": groups} if has_stages else {"mpu": groups.mpu}
    return engine_around(kind, world=world, **given, **arguments)


def _close(reference: weakref.ref[DynatrainEngine]) -> None:
    engine = reference()
    if engine is not None:
        engine.close()
