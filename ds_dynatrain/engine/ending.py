"""How an engine begins its work, and the end of its script: the others are told, and the groups are taken down."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as td

from ds_dynatrain.adapters.compiled import compiled_by_wrapping
from ds_dynatrain.adapters.process_groups import is_known
from ds_dynatrain.adapters.sequence import enter as enter_sequence
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.errors import SwitchRefused
from ds_dynatrain.space import VirtualParameterSpace


def open_for_work(engine: EngineParts, space: VirtualParameterSpace) -> None:
    """Last step of `initialize`: the space is registered, and the process knows of it."""
    engine.adopt_space(space)
    engine.is_open = True
    if engine.world is not None:
        enter_sequence(engine.deepspeed, engine.world, engine.layout)
        for extension in engine.extensions:
            extension.on_start()
    engine.switcher.tell_of_batch()
    if engine.idle:  # pay first imports now, not in a pause
        others = set() if compiled_by_wrapping(engine.host.module) else {3}
        for stage in sorted({engine.layout.zero_stage} | others):
            layout = engine.layout.replace(zero_stage=stage)
            with suppress(SwitchRefused):  # it will never be asked to go there
                engine.targets.check_features(layout)
                engine.switcher.rehearse(layout, 0)
    PROCESS.membership.add(engine)
    PROCESS.add(engine)
    engine.changes.begin()


def close(engine: EngineParts) -> None:
    """End of the script: tell the others, and take the process groups down while they can still answer."""
    with engine.turn():
        if end_job(engine):
            PROCESS.membership.end_script(engine)
    PROCESS.leave(engine)
    if is_known(td.group.WORLD) and not PROCESS.engines:
        td.destroy_process_group()


def end_job(engine: EngineParts) -> bool:
    """Leave the world and stand in the launch group again; False if that was done before."""
    engine.fallback.stop()
    if not engine.is_open:
        return False
    engine.is_open = False
    try:
        engine.switcher.give_up_late("its script has ended")
        engine.switcher.cancel()
        engine.saver.settle()
        PROCESS.membership.say_end(engine)
        engine.close_loaders()
    except RuntimeError:  # the store is gone: there is nobody left to tell
        pass
    PROCESS.membership.remove(engine)
    if engine.world is not None:
        engine.host.leave_shape()
    engine.leave_groups()
    engine.control.finish_teardowns()
    return True
