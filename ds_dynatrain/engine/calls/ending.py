"""The end of the script: the others are told, and the process groups are taken down."""

from __future__ import annotations

import torch.distributed as td

from ds_dynatrain.adapters.process_groups import is_known
from ds_dynatrain.adapters.worlds import drop
from ds_dynatrain.engine.core import EngineCore


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
            if self._end_job():
                self.membership.end_script(self)
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
            self.membership.say_end(self)
            self._switcher.close()
            self.surroundings.background.see_buried()
            self.close_loaders()
        except RuntimeError:  # the store is gone: there is nobody left to tell
            pass
        self.membership.remove(self)
        if self.world is not None:
            self.shaper.leave(self)
            self.control.bury(drop(self.world))
            self.world = None
        self.launch.install()
        self.control.see_buried()
        return True
