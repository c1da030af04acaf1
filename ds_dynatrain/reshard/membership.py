"""Membership: the processes that train together with this one. One object serves all engines of the process.

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
    """Base class of memberships, and the behavior of a job whose members never change. All methods are called on the
    main thread.

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
        """Number of the current generation of members, and the reason why it was formed; (0, "") in a fixed launch."""
        return 0, ""

    # ---- an engine is made, and ends ---------------------------------------------------------------------------------

    def refuse(self, settings: DynatrainConfig, model: nn.Module) -> None:
        """Raise UnsupportedError for settings or a model that this kind of job does not support."""

    def new_status(self) -> GroupStatus | None:
        """Return an object that records failures of process groups in an engine's first world; None if it is not
        needed."""
        return None

    def building_first(self, generation: int, engine: int) -> AbstractContextManager[None]:
        """Return a context manager for building an engine's first process groups.

        generation: the generation of the membership.
        engine: the number of the engine.
        """
        return nullcontext()

    def building_more(self, engine: int) -> AbstractContextManager[None]:
        """Return a context manager for building further process groups in the current world; see `building_first`."""
        return nullcontext()

    def stop_if_over(self, generation: int) -> None:
        """Raise WorldChanged if a failure has ended the generation that is being built. Cheap; call it in polling
        loops."""

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
        """Post that the script of this engine has ended. Raises torch's DistError if the members' key-value store is
        lost."""

    def remove(self, engine: EngineCore) -> None:
        """Record that an engine has ended. Called on all members at the same point of their scripts."""

    def end_script(self, engine: EngineCore) -> None:
        """Wait, at the end of the script, until no other member needs this process any longer."""

    def watch(self, board: Control) -> Watch:
        """Return an object that checks whether other members' scripts have ended. In a fixed launch it also detects
        deaths."""
        return Watch(board)

    def activate_between(self, engine: EngineCore) -> None:
        """Select the world that `torch.distributed` refers to between calls, in a process with several engines.

        engine: the first engine of the process.
        """
        engine.launch.install()

    # ---- training ----------------------------------------------------------------------------------------------------

    def at_boundary(self, engine: EngineCore, place: str) -> str:
        """Carry out all changes that are due at a boundary (a point between two optimizer steps) of an engine. On an
        idle member, the call returns only once there is work.

        place: the loader or call at which the script has reached the boundary.

        Returns a description of the unfinished global batch that kept changes from taking effect; "" if none did.
        Raises SystemExit if this process has nothing more to do.
        """
        raise NotImplementedError

    def waiting_change(self, engine: EngineCore) -> str:
        """Return a description of the change of members that waits for this engine to reach a boundary (a point between
        two optimizer steps); "" if there is none."""
        return ""

    def open_window(self, engine: EngineCore) -> None:
        """Begin a global batch. Called before a loader fetches the first micro-batch of it; ends an earlier discarded
        batch."""
        engine.is_discarded = False

    def stays_discarded(self, engine: EngineCore) -> bool:
        """Return whether the engine still has to discard global batches after the loss of a world, instead of training
        them."""
        return False

    def before_micro_batch(self, engine: EngineCore) -> None:
        """Check whether the world was lost, and handle that. Called before a loader fetches any micro-batch."""

    def surviving(self, engine: EngineCore, call: Callable[[], T], again: Callable[[], T]) -> T:
        """Return the result of `call`. If the world is lost during the call, return the result of `again` in the next
        world.

        In a job that cannot survive the loss of its world, `again` is never called.
        """
        return call()

    def returned(self, engine: EngineCore, output: Any) -> Any:
        """Return the object that the user gets as the output of a forward pass."""
        return output

    # ---- switches ----------------------------------------------------------------------------------------------------

    def reopen(self, engine: EngineCore) -> None:
        """Make sure that the members' key-value store is open before the user requests a switch.

        Raises SwitchRefused if there is none.
        """

    def able(self, engine: EngineCore) -> tuple[int, ...]:
        """Return the members to which a requested switch may assign a rank."""
        return engine.candidates.members

    def vacant(self, engine: EngineCore) -> Mapping[str, tuple[int, ...]]:
        """Return the nodes that the job does not need, because all their members are idle, with these members."""
        return {}

    def release(self, nodes: Sequence[str]) -> None:
        """Ask nodes without work to leave the job. Does not wait until they have left. Called on rank 0."""

    def guard(self, preparation: Preparation) -> None:
        """Connect a switch's preparation to this membership, so that a failure interrupts it. Called before the
        preparation starts."""

    def entered(self, engine: EngineCore) -> None:
        """Record that all members train in the new world of a late switch (optimizer state is still in transit).
        `ended` is called when the switch is over."""

    def ended(self, engine: EngineCore, proposal: Proposal, outcome: Outcome) -> None:
        """Record the end of a late switch (optimizer state moved after the pause) in which this member took part."""

    def tell(self, engine: EngineCore, event: SwitchEvent) -> None:
        """Report the end of a switch, late or not, to the observers of the job. Called on rank 0."""

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def loaded(self, engine: int) -> tuple[Any, ...] | None:
        """Return the stored result of `load_checkpoint` on a newcomer, which need not load the checkpoint itself; None
        if the caller has to load it.

        engine: the number of the engine.
        """
        return None

    def remember_load(self, engine: int, result: Sequence[Any]) -> None:
        """Store the result of `load_checkpoint` for members that join later."""

    def say_replaced(self, stretch: tuple[int, ...]) -> None:
        """Report to all members that may hold copies that another state is being loaded, so that earlier copies no
        longer count.

        stretch: `Mark.stretch` of the copies that will count from now on.

        Raises torch's DistError if the members cannot be reached.
        """
