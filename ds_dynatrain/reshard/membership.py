"""Membership: the processes that train together with this one, as one object for all engines of the process.

Every process has one (`PROCESS.membership`); no caller asks which kind it is:

| | `fixed_launch.FixedLaunch` | `elastic_membership.ElasticMembership` |
|---|---|---|
| members | the processes of the launch, to the end | those that the coordinator names |
| a boundary | a switch that the user asked for, or waiting for one | also every change of members |
| a call that loses its world | raises | returns in the next world |
| deaths | are told by heartbeats on the board | are told by the coordinator |
| SIGTERM | is left to the script | asks this member to leave |
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import nn

from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus
from ds_dynatrain.adapters.groups.worlds import Note, ignore
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.liveness import Watch
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.report import SwitchEvent
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.meeting import Outcome
from ds_dynatrain.reshard.preparation import Preparation

T = TypeVar("T")


class Membership:
    """Base class: a job whose members never change. All methods are called on the main thread.

    is_newcomer: this process has joined a running job. restores: it starts a job that has trained before, and whose
    state no member holds any more. is_aborted: the world that trains cannot be used any more.
    """

    is_newcomer = restores = is_aborted = False

    @property
    def node(self) -> str:
        """Name of this process's node, as other members know it."""
        return platform.node()

    @property
    def formed(self) -> tuple[int, str]:
        """Number of the present generation of members, and the reason for it in words; (0, "") in a fixed launch."""
        return 0, ""

    # ---- an engine is made, and ends ---------------------------------------------------------------------------------

    def refuse(self, settings: DynatrainConfig, model: nn.Module) -> None:
        """Raise UnsupportedError for settings or a model that this kind of job excludes."""

    def new_status(self) -> GroupStatus | None:
        """Return a status that records failures of groups of an engine's first world; None if this job has no use for
        one.
        """
        return None

    def building_first(self, generation: int, engine: int) -> AbstractContextManager[Note]:
        """Return a block for building an engine's first groups. generation: of the membership; engine: its number.

        The block's value is called for each group that was built.
        """
        return nullcontext(ignore)

    def building_more(self, engine: int) -> AbstractContextManager[Note]:
        """Return a block for building further groups of the world that trains; as `building_first`."""
        return nullcontext(ignore)

    def stop_if_over(self, generation: int) -> None:
        """Raise WorldChanged if a failure has overtaken what is being built for a generation. Cheap; call it in
        polls.
        """

    def could_not_build(self) -> None:
        """Note that an engine could not be made, and the script ends with an error."""

    def add(self, engine: EngineCore) -> None:
        """Note that an engine is open now."""

    def begin(self, world: Generation, members: tuple[int, ...]) -> None:
        """Note that the job has started, in that generation. members: those that train."""

    def say_end(self, engine: EngineCore) -> None:
        """Tell the others that this engine's script has ended; raise torch's DistError if the board is gone."""

    def remove(self, engine: EngineCore) -> None:
        """Note that an engine has ended, on all members at the same place of their scripts."""

    def end_script(self, engine: EngineCore) -> None:
        """Wait, at the end of the script, for members that still need this process."""

    def watch(self, board: Control) -> Watch:
        """Return a watch that looks for the end of others' scripts, and for deaths unless a coordinator handles
        these.
        """
        return Watch(board)

    def activate_between(self, engine: EngineCore) -> None:
        """Set what `torch.distributed` speaks of while none of several engines has the turn. engine: the first."""
        engine.launch.install()

    # ---- training ----------------------------------------------------------------------------------------------------

    def at_boundary(self, engine: EngineCore, place: str) -> str:
        """Do what is due at a boundary of an engine; on an idle member, return only when it works.

        Returns why nothing could take effect, in words: a global batch is open; "" if everything could. Raises
        SystemExit if this process has nothing more to do.
        """
        raise NotImplementedError

    def waiting_change(self, engine: EngineCore) -> str:
        """Return, in words, the change of members that waits for a boundary of this engine; "" if none does."""
        return ""

    def open_window(self, engine: EngineCore) -> None:
        """Begin a global batch, before a loader deals its first micro-batch; an earlier discarded batch is over
        then.
        """
        engine.is_discarded = False

    def stays_discarded(self, engine: EngineCore) -> bool:
        """Return whether an engine's next batches train nothing for the time being."""
        return False

    def before_micro_batch(self, engine: EngineCore) -> None:
        """Handle a lost world before a loader deals any micro-batch."""

    def surviving(self, engine: EngineCore, call: Callable[[], T], again: Callable[[], T]) -> T:
        """Return what `call` returns; in a job that survives a lost world, what `again` returns in the next one."""
        return call()

    def returned(self, engine: EngineCore, output: Any) -> Any:
        """Return what the user gets as the output of a forward pass."""
        return output

    # ---- switches ----------------------------------------------------------------------------------------------------

    def reopen(self, engine: EngineCore) -> None:
        """Make sure that there is a board, before the user asks for a switch; raise SwitchRefused if there is none."""

    def able(self, engine: EngineCore) -> tuple[int, ...]:
        """Return the members that a switch of the user's may give a rank to."""
        return engine.candidates.members

    def guard(self, preparation: Preparation) -> None:
        """Set a preparation's hooks and status before it starts."""

    def entered(self, engine: EngineCore) -> None:
        """Note that all train in the new world of a late switch; `ended` tells whether they stay there."""

    def ended(self, engine: EngineCore, proposal: Proposal, outcome: Outcome) -> None:
        """Note that a late switch has ended in which this member took part."""

    def tell(self, engine: EngineCore, event: SwitchEvent) -> None:
        """Report, on rank 0, how a switch of any kind ended, to those that watch the job."""

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def loaded(self, engine: int) -> tuple[Any, ...] | None:
        """Return the result of `load_checkpoint` on a newcomer, which loads nothing; None if the caller is to load."""
        return None

    def remember_load(self, engine: int, result: Sequence[Any]) -> None:
        """Keep the result of `load_checkpoint` for newcomers."""

    def say_replaced(self, stretch: tuple[int, ...]) -> None:
        """Tell all members that may have copies that a state is loaded in that stretch of training.

        Raises torch's DistError if they cannot be told.
        """
