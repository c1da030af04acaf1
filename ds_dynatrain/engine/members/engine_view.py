"""What membership asks of an engine: nothing else of it is touched in this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from ds_dynatrain.adapters.incoming import Row
from ds_dynatrain.adapters.settings import BatchSizes
from ds_dynatrain.adapters.worlds import LaunchWorld, World
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.preparation import Preparation
from ds_dynatrain.engine.surroundings import Boards, Candidates, Surroundings
from ds_dynatrain.space import Layout, VirtualParameterSpace

if TYPE_CHECKING:
    from ds_dynatrain.engine.members.voiding import Window


class OutcomeView(Protocol):
    """How a switch ended. is_uncertain: this member could not read the decision."""

    committed: bool
    is_uncertain: bool
    reason: str


class TransactionView(Protocol):
    """A switch that the caller carries out. record: the board and key of its decision."""

    record: tuple[Control, str]
    interrupt: BaseException | None
    preparation: Preparation

    @property
    def outcome(self) -> OutcomeView: ...

    def vote(self) -> bool:
        """All that can fail; whether it went well here."""

    def decide(self) -> dict[str, Any]:
        """The record, whoever wrote it."""

    def conclude(self, decision: dict[str, Any]) -> OutcomeView:
        """Do what it says."""


class SwitcherView(Protocol):
    """The part of an engine that switches. attempt: the highest generation number that was ever proposed to it."""

    attempt: int
    rule: Any

    def check(self, target: Layout, processes: int) -> None:
        """SwitchRefused if so many processes cannot train the model in a layout."""

    def needs(self, target: Layout, members: tuple[int, ...]) -> dict[int, int]:
        """Bytes that each member allocates for it."""

    def settle_meshes(self, proposal: Proposal) -> None:
        """Ask DeepSpeed what a thread cannot."""

    def rehearse(self, layout: Layout, rank: int) -> None:
        """Pay the first imports now."""

    def prepare(
        self,
        proposal: Proposal,
        boards: Boards | None = None,
        check: Callable[[], None] | None = None,
        nodes: Mapping[int, str] | None = None,
    ) -> None:
        """Make ready, in the background, for what was proposed."""

    def is_due(self, ahead: int = 1) -> bool:
        """On a working member: whether a switch that the user asked for is to happen now."""

    def transact(self, place: str) -> None:
        """Take part in it."""

    def transaction(self, place: str) -> TransactionView:
        """What `transact` carries out, for a caller that does so itself."""

    def note(self, preparation: Preparation, outcome: Any, was: tuple[Layout, tuple[int, ...]], begin: float) -> None:
        """It has ended."""

    def meet_idle(self, place: str) -> None:
        """On an idle member: take part in one that begins."""

    def look_for_proposal(self) -> None:
        """On an idle member: make ready for one that the working members have agreed on."""

    def give_up(self, reason: str) -> None:
        """What is being prepared cannot come about any more."""

    def close(self) -> None:
        """Let go of what is being prepared."""

    def register_again(self, records: Sequence[dict[str, Any]]) -> None:
        """On an idle member: what the job has registered."""

    def pass_time(self, seconds: float) -> None:
        """An idle member's turn: the user's `on_idle`, or a short sleep."""

    def save_if_due(self) -> None:
        """The fallback checkpoint, at a boundary."""

    def save_now(self) -> None:
        """The same before the end."""

    def settle_fallback(self) -> None:
        """None is due before the next step."""


class JobView(Protocol):
    """What was settled for an engine at the start; see `engine.job.Job`."""

    @property
    def number(self) -> int: ...
    @property
    def described(self) -> dict[str, str]: ...
    @property
    def rows(self) -> list[Row]: ...
    @property
    def batch_sizes(self) -> BatchSizes: ...
    @property
    def job_seed(self) -> int: ...
    @property
    def has_sequence(self) -> bool: ...


class EngineView(Protocol):
    """One engine of this process. world: this member's groups in the present world, None while it is idle."""

    settings: DynatrainConfig
    layout: Layout
    members: tuple[int, ...]
    world: World | None
    surroundings: Surroundings
    is_stepping: bool
    registered: list[dict[str, Any]]
    train_loaders: dict[str, Any]
    module: Any
    global_steps: Any
    last_switch: Any
    own_groups: Any
    shaper: Any

    @property
    def job(self) -> JobView: ...
    @property
    def _switcher(self) -> SwitcherView: ...
    @property
    def _window(self) -> Window: ...
    @property
    def turns(self) -> Any: ...
    @property
    def launch(self) -> LaunchWorld: ...
    @property
    def candidates(self) -> Candidates: ...
    @property
    def control(self) -> Control: ...
    @property
    def vps(self) -> VirtualParameterSpace: ...
    @property
    def idle(self) -> bool: ...
    @property
    def rank(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def is_switching(self) -> bool: ...
    @property
    def is_void(self) -> bool: ...
    @property
    def has_stood(self) -> bool: ...
    @property
    def has_open_window(self) -> bool: ...

    def turn(self) -> AbstractContextManager[None]:
        """Its own groups and random streams are in place inside."""

    def speak(self) -> None:
        """Put its world in place."""

    def close_loaders(self) -> None:
        """End their worker processes."""

    def void_window(self) -> None:
        """Drop the gradients of the open global batch, and go back to where it began."""

    def note_window(self) -> None:
        """A global batch that is void is dealt again from where the loaders are now."""

    def end_void(self) -> None:
        """What is dealt trains again."""

    def give_state_up(self) -> None:
        """Hold nothing any more."""
