"""State of an engine on this member, declared in one place, and the values computed from it.

The classes of `ds_dynatrain.engine` derive from `EngineCore` and add what an engine does. `EngineCore` does not depend
on them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as td

from ds_dynatrain.adapters.deepspeed.host import Host
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.groups.worlds import LaunchWorld, drop, install
from ds_dynatrain.adapters.zero.deepspeed_config import Settings, layout_config
from ds_dynatrain.adapters.zero.process_wide import ProcessWide
from ds_dynatrain.adapters.zero.state import Buffers, Memory, release
from ds_dynatrain.config import DynatrainConfig
from ds_dynatrain.data import BatchArithmetic, TrainLoader
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.session import Session
from ds_dynatrain.report import SwitchEvent
from ds_dynatrain.reshard.context import Candidates, Context, Job, OwnGroups
from ds_dynatrain.reshard.feasible import dealt
from ds_dynatrain.reshard.pending import PendingSwitch
from ds_dynatrain.reshard.preparation import ACKNOWLEDGED, Preparation, Ways
from ds_dynatrain.reshard.streams import Streams, capture, restore
from ds_dynatrain.space import Layout, VirtualParameterSpace


@dataclass(frozen=True)
class OldState:
    """Buffers, process groups and transports that a committed switch has replaced.

    A member that has not acknowledged the commit may still be in the switch. This object is therefore released only
    once all members have acknowledged it, or a later generation is entered, whose members have all left the switch.
    """

    session: Session
    buffers: Buffers
    world: World | None
    ways: Ways

    def is_needed(self, board: Control) -> bool:
        """Return whether some member may still be in the switch. Polls; never blocks.

        board: the members' key-value store of the current generation.
        """
        try:
            return board is self.session.board and not self.session.have_come(ACKNOWLEDGED)
        except td.DistError:  # the board is gone: the job ends, or another generation follows
            return True

    def release(self) -> None:
        """Free the buffers and destroy the process groups, in background threads."""
        self.ways.end()
        track = self.session.board.teardowns.add
        track(release(self.buffers))
        if self.world is not None:
            track(drop(self.world))


@dataclass(frozen=True)
class PutAsideState:
    """Process-wide state of an engine (such as random generators), saved while other engines use the process."""

    streams: Streams
    wide: ProcessWide

    @staticmethod
    def now() -> PutAsideState:
        """Capture the process-wide state as it is now."""
        return PutAsideState(capture(), ProcessWide.capture())

    def put(self) -> None:
        """Make this saved state the process-wide state again."""
        restore(self.streams)
        self.wide.put()


@dataclass(frozen=True)
class OpenBatch:
    """The part of an unfinished global batch that loaders have fetched so far.

    is_dealt: whether a loader of this package has begun to fetch the batch.
    samples: the number of samples in the whole batch; None if unknown.
    is_last: whether the last micro-batch fetched completes the batch.
    """

    is_dealt: bool = False
    samples: int | None = None
    is_last: bool = True


@dataclass(eq=False)
class EngineCore:
    """State of one engine on this member; see the docstring of the module.

    host: DeepSpeed's engine, and the operations on it.
    layout: the layout of the current world, also on an idle member.
    members: the member at each rank of the current world, also on an idle member.
    world: this member's process groups in the current world; None if it is idle.
    """

    host: Host
    job: Job
    context: Context
    layout: Layout
    members: tuple[int, ...]
    world: World | None
    attempt: int = 1
    """The highest generation number proposed so far. No number is used twice."""
    pending: PendingSwitch | None = None
    """The switch that was requested and has not taken place yet; None if there is none."""
    preparation: Preparation | None = None
    """The switch that is being prepared; None if there is none."""
    old_state: OldState | None = None
    """The state that the last switch has replaced, kept until all members have acknowledged the commit."""
    own: PutAsideState | None = None
    """This engine's process-wide state, saved while other engines use the process; None if this engine has the process
    to itself."""
    registered: list[dict[str, Any]] = field(default_factory=list)
    """Changes of trained parameters and groups that were made in this job, in order, as plain JSON."""
    job_epoch: int = 0
    """Number of epochs that the job has begun."""
    last_switch: SwitchEvent | None = None
    train_loaders: dict[str, TrainLoader] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)
    """The objects that the user has registered to be transferred, keyed by name."""
    arrived: dict[str, dict[str, Any]] = field(default_factory=lambda: {"loaders": {}, "objects": {}})
    """Loaded states of loaders and objects that do not exist in this process yet, keyed by name."""
    open_batch: OpenBatch = OpenBatch()
    is_discarded: bool = False
    """Whether the current global batch is discarded: the world was replaced during it, so it will be fetched again."""
    own_groups: OwnGroups = field(default_factory=OwnGroups)
    awaits_late: bool = False
    """Whether a late switch is still moving the optimizer's state into the current world."""
    late_worlds: tuple[World, ...] = ()
    """The worlds before and after a late switch, until the switch has ended."""
    is_stepping: bool = False
    """Whether an optimizer step is in progress."""
    has_stood: bool = False
    """Whether the engine has ever reached a boundary (a point between two optimizer steps)."""
    is_open: bool = False
    """Whether the engine is open: from the last step of `initialize` until it is closed."""
    safe_at: tuple[str, int] = ("", 0)
    """Segment and step at which the state was last saved, or built by a switch or a restoration."""
    formed_at: tuple[str, int] = ("", 0)
    """Segment and step at which the state was last built by a switch or a restoration.

    Until the next optimizer step, members need not meet at one boundary (a point between two optimizer steps).
    """
    began_from: str = ""
    """Tag of the backup checkpoint from which the engine started because the state was lost; "" if there was none."""
    safe_since: float = field(default_factory=time.monotonic)
    stream_seed: int = 0
    """Seed of the random streams of leaves (micro-batches of fixed size); a resumed job keeps its first seed."""
    _loads: tuple[int, int] = (0, 0)
    _space: VirtualParameterSpace | None = None
    _configs: dict[Layout, Settings] = field(default_factory=dict)

    # ---- its surroundings --------------------------------------------------------------------------------------------

    @property
    def settings(self) -> DynatrainConfig:
        """Settings of the `dynatrain` block of the configuration."""
        return self.job.settings

    @property
    def launch(self) -> LaunchWorld:
        """The process group that this process uses while it is idle."""
        return self.context.launch

    @property
    def candidates(self) -> Candidates:
        """The members that could train at present, idle ones included."""
        return self.context.candidates

    @property
    def control(self) -> Control:
        """The key-value store ("board") through which the members of the current generation communicate."""
        return self.context.control

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's engine, which is the object that the user works with."""
        return self.host.engine

    def activate(self) -> None:
        """Make `torch.distributed` and DeepSpeed use this engine's world."""
        if self.world is None:
            self.launch.install()
        else:
            install(self.world)
        self.host.put_in_place()

    # ---- its place and progress --------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether this member currently holds no state and waits for work."""
        return self.world is None

    @property
    def rank(self) -> int:
        """This member's rank in the current world (-1 on an idle member)."""
        return -1 if self.world is None or self.world.rank is None else self.world.rank

    def place(self, axis: str) -> int:
        """Return this member's index on an axis (-1 on an idle member)."""
        return -1 if self.idle else self.layout.coordinate(self.rank)[axis]

    @property
    def generation(self) -> int:
        """Number of the current world. The first world has number 1."""
        return self.world.generation if self.world is not None else self.attempt

    @property
    def segment(self) -> str:
        """Name of the current segment, which is a part of training in one world in which no step number occurs twice.

        The name is the same on all working members, so it is used as a prefix of the keys under which they communicate.
        `attempt` cannot be used for this, because it differs between members while a change of members is being
        prepared.
        """
        generation, count = self._loads
        return f"{self.generation}.{count if generation == self.generation else 0}"

    def begin_segment(self) -> None:
        """Begin a new segment before a checkpoint is loaded, because step numbers may then recur. Called on all working
        members.

        A subclass may raise CheckpointError on all members if no segment can begin.
        """
        self.repeat_places()

    def repeat_places(self) -> None:
        """Begin a new segment, because step numbers may recur in the same world."""
        self._loads = self.generation, 1 + (self._loads[1] if self._loads[0] == self.generation else 0)

    @property
    def global_steps(self) -> int:
        """Number of optimizer steps completed."""
        return int(self.deepspeed.global_steps)

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches trained in this world, plus earlier steps times the current gradient accumulation
        steps."""
        return int(self.deepspeed.micro_steps)

    @property
    def accumulation(self) -> int:
        """Number of micro-batches per global batch on each rank; with pipelines, the largest number in any pipeline
        replica."""
        return int(self.deepspeed.gradient_accumulation_steps())

    @property
    def has_open_window(self) -> bool:
        """Whether a global batch is unfinished. Operations on the whole state are possible only between two global
        batches."""
        return self.awaits_late or self.open_batch.is_dealt or self.micro_steps % self.accumulation != 0

    @property
    def window_in_words(self) -> str:
        """Description of the progress of an unfinished global batch, with advice, for errors raised between steps; ""
        if no batch is unfinished."""
        if not self.has_open_window:
            return ""
        trained, of = self.micro_steps % self.accumulation, self.accumulation
        if not trained:
            return "a global batch was drawn and not trained; make the optimizer step before the next boundary"
        return (
            f"an accumulation window is open, {trained} of {of} micro-batches; come to a boundary after a complete "
            "one, and train every micro-batch: one that is left out (`continue`) shifts all that follow"
        )

    @property
    def is_in_epoch(self) -> bool:
        """Whether the script is iterating over a train loader."""
        return any(loader.has_begun for loader in self.train_loaders.values())

    @property
    def is_switching(self) -> bool:
        """Whether a switch is being prepared."""
        return self.preparation is not None

    @property
    def is_lean(self) -> bool:
        """Whether a switch releases the memory of the old state before it allocates that of the new state."""
        return self.settings.safety == "lean"

    # ---- what it trains ----------------------------------------------------------------------------------------------

    @property
    def vps(self) -> VirtualParameterSpace:
        """The Virtual Parameter Space of the model under the current layout and members."""
        if self._space is None:
            raise RuntimeError("the engine is being made: its parameters are not registered yet")
        return self._space.with_layout(self.layout, self.members)

    def adopt_space(self, space: VirtualParameterSpace) -> None:
        """Replace the Virtual Parameter Space (the set of all logical tensors of the model)."""
        self._space = space

    def memory_in(self, layout: Layout) -> dict[str, Memory]:
        """Return the dtype and device of the buffers of each state kind under a layout."""
        return self.host.memory(self.vps.present_kinds(layout), layout)

    def config_for(self, layout: Layout) -> Settings:
        """Return DeepSpeed's configuration for a layout, as a dictionary and as a parsed object. The result is
        cached."""
        if layout not in self._configs:
            config = copy.deepcopy(self.job.user_config)
            self.host.shaper.configure(config, layout)
            self._configs[layout] = layout_config(config, layout, self.batch_for(layout))
        return self._configs[layout]

    def batch_for(self, layout: Layout) -> BatchArithmetic:
        """Return how a global batch is divided among the ranks of a layout."""
        return dealt(self.job.batch_sizes, layout, self.job.has_stages)

    def agree(self, meet: Callable[[int], object] | None = None) -> None:
        """Wait until the accelerators' collectives have delivered their results on all ranks; see `Gate.agree`.

        Called on all ranks before they use, copy, save or move a state computed from those results. Raises WorldChanged
        if a rank may lack some of the results.

        meet: an exchange to use for reaching the agreement; see `World.agree`.
        """
        if self.world is not None:
            self.world.agree(meet)

    @property
    def is_in_doubt(self) -> bool:
        """Whether aborted collectives of an accelerator may have left wrong values in the state; see `Gate`."""
        return self.world is not None and self.world.status is not None and self.world.status.gate.is_in_doubt

    # ---- what happens to it ------------------------------------------------------------------------------------------

    def enter(self, proposal: Proposal, world: World | None) -> None:
        """Make the world, layout and members of a switch the current ones. Called by the transaction.

        world: this member's process groups in the new world; None on an idle member.
        """
        self.release_old_state()
        self.world, self.layout, self.members = world, proposal.layout, proposal.members

    def release_old_state(self, unless_needed: bool = False) -> None:
        """Release the state that the last switch has replaced, if it is still held.

        unless_needed: whether to keep it if another member may still need it.
        """
        if self.old_state is not None and not (unless_needed and self.old_state.is_needed(self.control)):
            self.old_state.release()
            self.old_state = None

    def forget_batch(self) -> None:
        """Record that no global batch is in progress."""
        self.open_batch = OpenBatch()
        self.host.slot_weight, self.host.slot_is_borrowed, self.host.micro_step = 1.0, False, None

    def begin_anew(self, generation: int) -> None:
        """Drop the unfinished global batch and any pending switch. Worlds formed later get numbers above
        `generation`."""
        self.forget_batch()
        self.host.window_tokens = None
        self.close_preparation()
        self.pending = None
        self.attempt = max(self.attempt, generation)
        self.settle_state()

    def settle_state(self) -> None:
        """Record that a switch or a restoration has just built the current state."""
        self.formed_at = self.segment, self.global_steps
        self.note_safe()

    def note_safe(self) -> None:
        """Record that the current state is saved or newly built, so that no save is needed before the next step."""
        self.safe_at, self.safe_since = (self.segment, self.global_steps), time.monotonic()

    def close_preparation(self) -> None:
        """Abandon the switch that is being prepared, if there is one."""
        if self.preparation is not None:
            self.preparation.abandon()
            self.attempt = self.preparation.proposal.generation
            self.preparation = None

    def close_loaders(self) -> None:
        """Stop the worker processes of all train loaders; the loaders keep their positions."""
        for loader in self.train_loaders.values():
            loader.close()
