"""How an engine begins its work, and the end of its script: the others are told, and the groups are taken down."""

from __future__ import annotations

import time
from contextlib import suppress

import torch.distributed as td

from ds_dynatrain.adapters.compiled import compiled_by_wrapping
from ds_dynatrain.adapters.process_groups import is_known
from ds_dynatrain.adapters.sequence import enter as enter_sequence
from ds_dynatrain.engine.liveness import Heartbeat, ended_in_error, post_end
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.process import PROCESS, Membership
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.space import VirtualParameterSpace

SEE_OFF_SECONDS = 5.0


def open_for_work(engine: EngineParts, space: VirtualParameterSpace, membership: Membership | None) -> None:
    """Last step of `initialize`: the space is registered, the heartbeat beats."""
    engine.adopt_space(space)
    engine.is_open, engine.membership = True, membership
    if engine.world is not None:
        enter_sequence(engine.deepspeed, engine.world, engine.layout)
    if engine.job.elastic is None:
        engine.heartbeat = Heartbeat(engine.control)
        engine.heartbeat.start()
    if engine.idle:  # pay first imports now, not in a pause
        others = set() if compiled_by_wrapping(engine.host.module) else {3}
        for stage in sorted({engine.layout.zero_stage} | others):
            layout = engine.layout.replace(zero_stage=stage)
            with suppress(SwitchRefused):  # it will never be asked to go there
                engine.targets.check_features(layout)
                engine.attempts.rehearse(layout, 0)
    PROCESS.add(engine, membership)


def close(engine: EngineParts) -> None:
    """End of the script: tell the others, and take the process groups down while they can still answer."""
    with engine.turn():
        if end_job(engine) and engine.job.elastic is None and engine.control.member == 0:
            _see_others_off(engine)
    PROCESS.leave(engine)
    if is_known(td.group.WORLD) and not PROCESS.engines:
        td.destroy_process_group()


def end_job(engine: EngineParts) -> bool:
    """Leave the world and stand in the launch group again; False if that was done before."""
    engine.fallback.stop()
    if not engine.is_open:
        return False
    engine.is_open, elastic = False, engine.job.elastic
    try:
        engine.saver.settle()
        if elastic is None or not elastic.member.is_leaving:  # it ends, and the job goes on
            post_end(engine.control)
        if engine.heartbeat is not None:
            engine.heartbeat.stop()
        engine.close_preparation()
        engine.surroundings.background.see_buried()
        engine.close_loaders()
    except RuntimeError:  # the store is gone: there is nobody left to tell
        pass
    if engine.membership is not None:
        engine.membership.leave(engine)
    if elastic is not None and not engine.others:
        elastic.member.stop(has_ended=not ended_in_error())
    if engine.world is not None:
        engine.host.leave_shape()
    engine.leave_groups()
    engine.control.see_buried()
    return True


def _see_others_off(engine: EngineParts) -> None:
    """The store may live in this process: who is released by it, idle or late, reads that before it goes."""
    waiting = [f"left/{member}" for member in engine.candidates.members if member not in engine.members]
    waiting += [f"ended/{member}" for member in PROCESS.course.late]
    deadline = time.monotonic() + SEE_OFF_SECONDS
    while waiting and time.monotonic() < deadline:
        waiting = [key for key in waiting if engine.control.read(key) is None]
        time.sleep(0.02)
