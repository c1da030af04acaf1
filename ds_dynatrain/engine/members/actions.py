"""What `change.ChangeMachine` is told, and what it wants done: plain values; `executor` carries them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ds_dynatrain.elastic.world import World
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.copies.whole import Had, WholeCopies
from ds_dynatrain.engine.members.registry import Registry
from ds_dynatrain.engine.members.survival import Source
from ds_dynatrain.errors import DynatrainError
from ds_dynatrain.space import Layout

Proposals = tuple[Proposal, ...]
"""One for each engine of a process."""


@dataclass(frozen=True)
class Held:
    """What one engine of this process holds just now.

    number: of this member. rank: None if the engine is idle. attempt: the highest generation number that was proposed
    to it. is_clean: no optimizer step is under way. is_switching: something is being prepared. can_restore: it has
    fallback checkpoints. registered, since: as in `Survivor`; since asks the store. copies: which ones this process
    has. damaged: of those that it is to give, the ranks whose copy is not what it was made of; it takes reading them.
    frozen: as in `Survivor`. goes_late: whether masters and moments are to follow after the pause of a switch to a
    layout.
    """

    number: int
    layout: Layout
    members: tuple[int, ...]
    rank: int | None
    attempt: int
    generation: int
    step: int
    is_clean: bool = True
    is_switching: bool = False
    can_restore: bool = False
    registered: int = 0
    since: Callable[[], tuple[int, ...] | None] = tuple
    copies: Callable[[], tuple[Had, ...]] = tuple
    damaged: Callable[[WholeCopies], tuple[int, ...]] = lambda copies: ()
    frozen: tuple[dict[str, Any], int] | None = None
    goes_late: Callable[[Layout], bool] = lambda layout: False


@dataclass(frozen=True)
class Own:
    """What a process knows of itself.

    world: the generation that it has entered; registry: the numbers of its members. is_aborted: nothing of the world
    that trains can be used any more. is_leaving: it was told to go. engines: in the order in which they were made; the
    first one speaks for all. has_waited: whether training goes on if the others are not at this boundary, too.
    """

    member: str
    world: World | None
    registry: Registry
    is_aborted: bool
    engines: tuple[Held, ...]
    is_leaving: bool = False
    has_waited: bool = True

    @property
    def is_idle(self) -> bool:
        """Whether the first engine holds nothing."""
        return self.engines[0].rank is None

    @property
    def is_all_idle(self) -> bool:
        """Whether no engine holds anything."""
        return all(engine.rank is None for engine in self.engines)

    @property
    def is_switching(self) -> bool:
        """Whether something is being prepared for an engine."""
        return any(engine.is_switching for engine in self.engines)

    @property
    def makes_steps(self) -> bool:
        """Whether those that train do."""
        return not self.is_aborted and self.world is not None and not self.world.paused

    def goes_late(self, world: World, targets: Sequence[tuple[Layout, tuple[int, ...]]]) -> bool:
        """Whether masters and moments are to follow in the first step of a generation. targets: of each engine."""
        if not self.makes_steps or world.paused or not world.members:
            return False
        moving = [(one, to) for one, to in zip(self.engines, targets, strict=True) if to != (one.layout, one.members)]
        return bool(moving) and all(one.goes_late(layout) for one, (layout, _) in moving)


@dataclass(frozen=True)
class GiveUp:
    """Whatever is being prepared cannot come about."""

    reason: str


@dataclass(frozen=True)
class Open:
    """Connect to the boards of a generation, or connect again."""

    world: World


@dataclass(frozen=True)
class Know:
    """The numbers of all members, this one's own among them."""

    registry: Registry


@dataclass(frozen=True)
class Post:
    """Say something on the board of an engine."""

    key: str
    value: Any
    engine: int = 0


@dataclass(frozen=True)
class Decide:
    """Say something on the first engine's board, unless somebody was first."""

    key: str
    value: Any


@dataclass(frozen=True)
class PostJob:
    """Say what newcomers build their engines by, on the board of each."""

    registry: Registry


@dataclass(frozen=True)
class Learn:
    """On an idle member: what `PostJob` has said."""

    records: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Void:
    """Copies from before that stretch of training count no more, on whoever has them."""

    before: tuple[int, ...]


@dataclass(frozen=True)
class LetGo:
    """Hold nothing any more. lost: what is gone for good, in words."""

    lost: str = ""


@dataclass(frozen=True)
class Hold:
    """Go on from what the sources, one for each engine, say; who is in none holds nothing of that engine."""

    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Prepare:
    """Make each engine ready for its part; "prepared" is posted when it is."""

    proposals: Proposals


@dataclass(frozen=True)
class Transact:
    """Take part in what was prepared; then, of a late switch when its record is written, `ChangeMachine.transacted`."""


@dataclass(frozen=True)
class Restore:
    """Take the state from copies, one for each engine, or else from a checkpoint, with all members of the target; then
    `ChangeMachine.restored`."""

    proposals: Proposals
    copies: tuple[WholeCopies, ...] = ()


@dataclass(frozen=True)
class Serve:
    """Give those who restore the copies that this member has; it has no place among them."""

    proposals: Proposals
    copies: tuple[WholeCopies, ...]


@dataclass(frozen=True)
class Spend:
    """An attempt was rolled back, on all members: its numbers are used up."""

    proposals: Proposals
    tries: int
    reason: str


@dataclass(frozen=True)
class Enter:
    """Be in the generation from here on, each engine where its proposal says."""

    world: World
    registry: Registry
    proposals: Proposals


@dataclass(frozen=True)
class Leave:
    """End the process: it has handed over what it had. must_save: nobody was there to take it."""

    must_save: bool = False


@dataclass(frozen=True)
class Fail:
    """End the script by an error."""

    error: DynatrainError


Action = (
    GiveUp
    | Open
    | Know
    | Post
    | Decide
    | PostJob
    | Learn
    | Void
    | LetGo
    | Hold
    | Prepare
    | Transact
    | Restore
    | Serve
    | Spend
    | Enter
    | Leave
    | Fail
)
