"""The end of the script: the others are told, and the process groups are taken down."""

from __future__ import annotations

import time

import torch.distributed as td

from ds_dynatrain.adapters.process_groups import is_known
from ds_dynatrain.adapters.worlds import drop
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.liveness import ended_in_error, post_end

SEE_OFF_SECONDS = 5.0


class EndingCalls(EngineCore):
    """How an engine ends."""

    def destroy(self) -> None:
        """DeepSpeed's, and the end of this engine's job: members that wait for work in it are let go."""
        with self.turn():
            self._end_job()
            super().destroy()
            if "_gradients" in self.__dict__:
                self.let_module_go()
        self.turns.leave(self)

    def close(self) -> None:
        """End of the script: tell the others, and take the process groups down while they can still answer."""
        with self.turn():
            if self._end_job() and self.job.elastic is None and self.control.member == 0:
                self._see_others_off()
        self.turns.leave(self)
        if is_known(td.group.WORLD) and not self.turns.engines:
            td.destroy_process_group()

    def _end_job(self) -> bool:
        """Leave the world and stand in the launch group again; False if that was done before."""
        self._switcher.stop_listening()
        if not self.__dict__.get("_is_open", False):
            return False
        self._is_open = False
        try:
            self.saver.settle()
            if self.job.elastic is None or not self.job.elastic.member.is_leaving:  # it ends, and the job goes on
                post_end(self.control)
            if self._heartbeat is not None:
                self._heartbeat.stop()
            self._switcher.close()
            self.surroundings.background.see_buried()
            self.close_loaders()
        except RuntimeError:  # the store is gone: there is nobody left to tell
            pass
        if self._switcher.changes is not None:
            self._switcher.changes.leave(self)
        others = [other for other in self.turns.engines if other is not self]
        if self.job.elastic is not None and not others:
            self.job.elastic.member.stop(has_ended=not ended_in_error())
        if self.world is not None:
            self.shaper.leave(self)
            self.control.bury(drop(self.world))
            self.world = None
        self.launch.install()
        self.control.see_buried()
        return True

    def _see_others_off(self) -> None:
        """The store may live in this process: who is released by it, idle or late, reads that before it goes."""
        waiting = [f"left/{member}" for member in self.candidates.members if member not in self.members]
        waiting += [f"ended/{member}" for member in self.turns.course.late]
        deadline = time.monotonic() + SEE_OFF_SECONDS
        while waiting and time.monotonic() < deadline:
            waiting = [key for key in waiting if self.control.read(key) is None]
            time.sleep(0.02)
