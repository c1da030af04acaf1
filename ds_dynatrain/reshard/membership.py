"""Membership: the processes that train together with this one, as one object for all engines of the process.

Every process has one (`PROCESS.membership`), and callers need not know its class:

| | `fixed_launch.FixedLaunch` | `elastic_membership.ElasticMembership` |
|---|---|---|
| members | the processes of the launch, to the end | those that the coordinator names |
| changes at a boundary | a requested switch, or waiting for one | also every change of members |
| a call that loses its world | raises | returns in the next world |
| deaths | are detected by heartbeats on the board | are reported by the coordinator |
| SIGTERM | is left to the script | asks this member to leave |
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import nn

from ds_dynatrain.adapters.groups.managed_process_group import GroupStatus
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.elastic.generation import Generation
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.liveness import Watch
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.report import SwitchEvent
from ds_dynatrain.reshard.core import EngineCore
from ds_dynatrain.reshard.preparation import Outcome, Preparation

T = TypeVar("T")


class Membership:
    """Base class: a job whose members never change. All methods are called on the main thread.

    is_newcomer: whether this process has joined a running job.
    restores: whether this process starts a job that has trained before and whose state no member holds any longer.
    is_aborted: whether the current world can no longer be used.
    """

    is_newcomer = restores = is_aborted = False

    @property
    def node(self) -> str:
        """Name of this process's node, as other members know it."""
        return platform.node()

    @property
    def formed(self) -> tuple[int, str]:
        """(number of the current generation of members, reason why it was formed); (0, "") in a fixed launch."""
        return 0, ""

    # ---- an engine is made, and ends ---------------------------------------------------------------------------------

    def refuse(self, settings: DynatrainConfig, model: nn.Module) -> None:
        """Raise UnsupportedError for settings or a model that this kind of job does not support."""

    def new_status(self) -> GroupStatus | None:
        """Return an object that records failures of groups in an engine's first world; None if it is not needed."""
        return None

    def building_first(self, generation: int, engine: int) -> AbstractContextManager[None]:
        """Return a context manager for building an engine's first groups.

        generation: the generation of the membership.
        engine: the number of the engine.
        """
        return nullcontext()

    def building_more(self, engine: int) -> AbstractContextManager[None]:
        """Return a context manager for building further groups in the current world; see `building_first`."""
        return nullcontext()

    def stop_if_over(self, generation: int) -> None:
        """Raise WorldChanged if a failure ended the generation that is being built. Cheap; call it in polling loops."""

    def could_not_build(self) -> None:
        """Record that an engine could not be made, so that the script ends with an error."""

    def add(self, engine: EngineCore) -> None:
        """Record that an engine has been opened."""

    def begin(self, world: Generation, members: tuple[int, ...]) -> None:
        """Record that the job has started.

        world: the generation in which it started.
        members: the members that train.
        """

    def say_end(self, engine: EngineCore) -> None:
        """Post that this engine's script has ended; raise torch's DistError if the board is lost."""

    def remove(self, engine: EngineCore) -> None:
        """Record that an engine has ended. Called on all members at the same point of their scripts."""

    def end_script(self, engine: EngineCore) -> None:
        """Wait, at the end of the script, for members that still need this process."""

    def watch(self, board: Control) -> Watch:
        """Return a watch for the end of other members' scripts, and for deaths unless a coordinator reports them."""
        return Watch(board)

    def activate_between(self, engine: EngineCore) -> None:
        """Set the world that `torch.distributed` uses between the calls of several engines.

        engine: the first engine of the process.
        """
        engine.launch.install()

    # ---- training ----------------------------------------------------------------------------------------------------

    def at_boundary(self, engine: EngineCore, place: str) -> str:
        """Carry out all changes that are due at a boundary of an engine. An idle member returns only once it has work.

        Return a description of the open global batch that kept changes from taking effect; "" if none did. Raise
        SystemExit if this process has nothing more to do.
        """
        raise NotImplementedError

    def waiting_change(self, engine: EngineCore) -> str:
        """Return a description of the member change that waits for a boundary of this engine; "" if there is none."""
        return ""

    def open_window(self, engine: EngineCore) -> None:
        """Begin a global batch, before a loader fetches its first micro-batch. This ends an earlier discarded batch."""
        engine.is_discarded = False

    def stays_discarded(self, engine: EngineCore) -> bool:
        """Return whether the engine's next global batches train nothing for the time being."""
        return False

    def before_micro_batch(self, engine: EngineCore) -> None:
        """Handle the loss of the world. Called before a loader fetches any micro-batch."""

    def surviving(self, engine: EngineCore, call: Callable[[], T], again: Callable[[], T]) -> T:
        """Return the result of `call`, or of `again` in the next world if the current one is lost during the call.

        A job that cannot survive the loss of its world never calls `again`.
        """
        return call()

    def returned(self, engine: EngineCore, output: Any) -> Any:
        """Return the value to give to the user for a forward pass's output."""
        return output

    # ---- switches ----------------------------------------------------------------------------------------------------

    def reopen(self, engine: EngineCore) -> None:
        """Make sure that there is a board for a switch that the user requests.

        Raises SwitchRefused if there is none.
        """

    def able(self, engine: EngineCore) -> tuple[int, ...]:
        """Return the members to which a switch that the user requests may give a rank."""
        return engine.candidates.members

    def vacant(self, engine: EngineCore) -> Mapping[str, tuple[int, ...]]:
        """Return a map from each node that could leave the job to its members: nodes whose members are all idle."""
        return {}

    def release(self, nodes: Sequence[str]) -> None:
        """Ask nodes without work to leave the job, without waiting for them. Called on rank 0."""

    def guard(self, preparation: Preparation) -> None:
        """Set a preparation's hooks and status. Called before the preparation starts."""

    def entered(self, engine: EngineCore) -> None:
        """Record that all members train in the new world of a late switch, whose outcome `ended` reports later."""

    def ended(self, engine: EngineCore, proposal: Proposal, outcome: Outcome) -> None:
        """Record the end of a late switch in which this member took part."""

    def tell(self, engine: EngineCore, event: SwitchEvent) -> None:
        """Report the end of a switch of any kind to the observers of the job. Called on rank 0."""

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def loaded(self, engine: int) -> tuple[Any, ...] | None:
        """Return the stored result of `load_checkpoint` on a newcomer, which need not load; None if the caller must."""
        return None

    def remember_load(self, engine: int, result: Sequence[Any]) -> None:
        """Store the result of `load_checkpoint` for newcomers."""

    def say_replaced(self, stretch: tuple[int, ...]) -> None:
        """Report to all members that may hold copies that another state is being loaded.

        stretch: identifies the part of training (between two loads) to which the report applies.

        Raise torch's DistError if the members cannot be reached.
        """
