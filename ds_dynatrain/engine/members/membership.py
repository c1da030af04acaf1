"""Who trains together with this process, asked of one object that all engines of the process share.

Every process has one (`PROCESS.membership`); no caller asks which kind it is:

| | `fixed_launch.FixedLaunch` | `elastic_membership.ElasticMembership` |
|---|---|---|
| who is there | the processes of the launch, to the end | who the coordinator says is there |
| a boundary | a switch that the user asked for, or waiting for one | also every change of members |
| a call that loses its world | raises | returns in the next world |
| who is dead | heartbeats on the board tell | the coordinator tells |
| SIGTERM | is the script's affair | this member is to leave |
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import nn

from ds_dynatrain.adapters.watched import GroupStatus
from ds_dynatrain.adapters.worlds import Note, ignore
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.core import EngineCore
from ds_dynatrain.engine.liveness import Watch
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.proposal import Proposal
from ds_dynatrain.engine.transaction.meeting import Outcome
from ds_dynatrain.report import SwitchEvent

T = TypeVar("T")


class Membership:
    """Base: a job whose generation of members never changes. All is called on the main thread.

    is_newcomer: this process has joined a job that ran. restores: it starts a job that has trained before, and whose
    state nobody holds any more. is_aborted: the world that trains cannot be used any more. takes_sigterm: SIGTERM asks
    this member to leave the job. saves_jointly: all engines of the process save their fallback checkpoints when one
    does.
    """

    is_newcomer = restores = is_aborted = takes_sigterm = saves_jointly = False

    @property
    def node(self) -> str:
        """Where this process runs, as others know it."""
        return platform.node()

    @property
    def formed(self) -> tuple[int, str]:
        """The generation of members that this process is in, and in words why there is one; (0, "") where they stay."""
        return 0, ""

    # ---- an engine is made, and ends ---------------------------------------------------------------------------------

    def refuse(self, settings: DynatrainConfig, model: nn.Module) -> None:
        """UnsupportedError for what this kind of job cannot have."""

    def new_status(self) -> GroupStatus | None:
        """For the groups of an engine's first world: what tells of their failures, if that is of use."""
        return None

    def building_first(self, generation: int, engine: int) -> AbstractContextManager[Note]:
        """Around the building of an engine's first groups. generation: of the membership; engine: its number.

        Gives what is told of each group that was built.
        """
        return nullcontext(ignore)

    def building_more(self, engine: int) -> AbstractContextManager[Note]:
        """Around the building of further groups of the world that trains; as `building_first`."""
        return nullcontext(ignore)

    def stop_if_over(self, generation: int) -> None:
        """Raise WorldChanged if a failure has overtaken what is built for a generation. Cheap; call it in polls."""

    def could_not_build(self) -> None:
        """An engine was not made, and the script ends by an error."""

    def add(self, engine: EngineCore) -> None:
        """An engine is open from here on."""

    def begin(self, world: World, members: tuple[int, ...]) -> None:
        """The job has started, in that generation. members: those that train."""

    def say_end(self, engine: EngineCore) -> None:
        """Tell the others that this engine's script is through; torch's DistError if the board is gone."""

    def remove(self, engine: EngineCore) -> None:
        """An engine has ended, on all members at the same place of their scripts."""

    def end_script(self, engine: EngineCore) -> None:
        """The script is over: see those off who wait for a word of this process."""

    def watch(self, board: Control) -> Watch:
        """Look for the end of others' scripts, and for their deaths where nobody else sees to these."""
        return Watch(board)

    def activate_between(self, engine: EngineCore) -> None:
        """Let `torch.distributed` be what it is while no engine of several has the turn. engine: the first."""
        engine.launch.install()

    # ---- training ----------------------------------------------------------------------------------------------------

    def at_boundary(self, engine: EngineCore, place: str) -> str:
        """Let whatever is due at a boundary of an engine take place; an idle member returns only when it works.

        Returns why nothing could, in words: a global batch is open; "" if everything could. SystemExit where this
        process has nothing more to do.
        """
        raise NotImplementedError

    def waiting_change(self, engine: EngineCore) -> str:
        """Return, in words, the change of members that waits for a boundary of this engine; "" if none does."""
        return ""

    def open_window(self, engine: EngineCore) -> None:
        """A loader is about to deal the first micro-batch of a global batch; what was void before it is over."""
        engine.is_discarded = False

    def stays_discarded(self, engine: EngineCore) -> bool:
        """Whether what an engine deals trains nothing for the time being."""
        return False

    def before_micro_batch(self, engine: EngineCore) -> None:
        """A loader is about to deal any micro-batch."""

    def surviving(self, engine: EngineCore, call: Callable[[], T], again: Callable[[], T]) -> T:
        """Return what `call` returns; if it can lose its world and go on, what `again` returns in the next one."""
        return call()

    def returned(self, engine: EngineCore, output: Any) -> Any:
        """Return what the user gets of a forward pass's output."""
        return output

    # ---- switches ----------------------------------------------------------------------------------------------------

    def reopen(self, engine: EngineCore) -> None:
        """The user asks for a switch: SwitchRefused if there is no board."""

    def able(self, engine: EngineCore) -> tuple[int, ...]:
        """The members that a switch of the user's may give a rank to."""
        return engine.candidates.members

    def guard(self, preparation: Preparation) -> None:
        """A switch is about to be prepared."""

    def entered(self, engine: EngineCore) -> None:
        """All train in the new world of a late switch; `ended` tells whether they stay there."""

    def ended(self, engine: EngineCore, proposal: Proposal, outcome: Outcome) -> None:
        """A switch has ended, in which this member took part: one that the user asked for, or a late one."""

    def retrain(self, members: tuple[int, ...]) -> None:
        """Others hold the state from here on, in the same generation, by a switch without this member."""

    def tell(self, engine: EngineCore, event: SwitchEvent) -> None:
        """Tell whoever watches the job, on rank 0, how a switch of any kind went."""

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def loaded(self, engine: int) -> tuple[Any, ...] | None:
        """What `load_checkpoint` is to return without loading anything: on a newcomer what the job's own returned."""
        return None

    def remember_load(self, engine: int, result: Sequence[Any]) -> None:
        """What `load_checkpoint` has returned, for those who come later."""

    def say_replaced(self, stretch: tuple[int, ...]) -> None:
        """Say to all who may have copies that a state is loaded in that stretch of training; torch's DistError if it
        cannot be said."""
