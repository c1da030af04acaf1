"""The engine's ground: its state, the present world as it sees it, and the sizes that follow from a layout."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch

from ds_dynatrain.adapters.children import Made
from ds_dynatrain.adapters.host import HostEngine, Replaced
from ds_dynatrain.adapters.settings import layout_config
from ds_dynatrain.adapters.worlds import LaunchWorld, World, install
from ds_dynatrain.data import BatchArithmetic, TrainLoader
from ds_dynatrain.engine.agreement import Proposal
from ds_dynatrain.engine.checkpoints.restoration import Restored
from ds_dynatrain.engine.checkpoints.saving import Saver
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.groups import OwnGroups
from ds_dynatrain.engine.job import Job
from ds_dynatrain.engine.members.membership import Membership
from ds_dynatrain.engine.members.voiding import Window
from ds_dynatrain.engine.surroundings import Candidates, Surroundings
from ds_dynatrain.engine.switcher import Switcher
from ds_dynatrain.engine.turns import Own, Turns
from ds_dynatrain.report import SwitchEvent, logger
from ds_dynatrain.space import Layout, VirtualParameterSpace


class EngineCore(HostEngine):
    """What every part of the engine rests on: what it holds, what is around it, and its arithmetic.

    layout, members: of the present world, also on an idle member. world: this member's process groups in it, None if
    it is idle. job_epoch: epochs that the job has begun. last_switch: how the last switch ended. resumed:
    what `dynatrain.resume` found, None if it began.
    """

    layout: Layout
    members: tuple[int, ...]
    world: World | None
    job_epoch: int
    surroundings: Surroundings
    turns: Turns
    """The engines of this process."""
    own: Own | None
    """What it has put aside while others have the process; None where it has the process to itself."""
    registered: list[dict[str, Any]]
    """What the job has registered anew, in order; plain JSON."""
    last_switch: SwitchEvent | None
    resumed: Restored | None
    train_loaders: dict[str, TrainLoader]
    _evaluation_loaders: int
    carried: dict[str, Any]
    is_stepping: bool
    """Whether an optimizer step was begun and not finished."""
    _window: Window
    saver: Saver
    own_groups: OwnGroups
    _has_stood: bool
    """Whether it has come to a boundary yet."""
    _switcher: Switcher
    _window_samples: int | None
    global_samples: int
    _arrived: dict[str, dict[str, Any]]
    """States that were loaded for loaders and objects which are not there yet."""
    _last_dealt: bool
    """Whether the micro-batch that was dealt last closes its global batch."""

    def __init__(
        self,
        *,
        job: Job,
        surroundings: Surroundings,
        layout: Layout,
        members: tuple[int, ...],
        world: World | None,
        turns: Turns,
        **arguments: Any,
    ) -> None:
        # DeepSpeed's constructor calls methods that read these, and torch's Module takes no attribute before its own
        self.__dict__.update(job=job, layout=layout, members=members, world=world, job_epoch=0, registered=[])
        self.__dict__.update(surroundings=surroundings, turns=turns, own=None)
        self.__dict__.update(last_switch=None, resumed=None, train_loaders={}, carried={}, _space=None, _configs={})
        self.__dict__.update(_arrived={"loaders": {}, "objects": {}})
        self.__dict__.update(_dealt=False, _window_samples=None, _is_open=False, _last_dealt=True)
        self.__dict__.update(settings=job.settings, _window=Window(self), is_stepping=False)
        self.__dict__.update(own_groups=OwnGroups(), _has_stood=False, _evaluation_loaders=0)
        self.__dict__.update(saver=Saver(self), _switcher=Switcher(self, job.on_idle))
        super().__init__(attached=world is not None, **arguments)

    # ---- what is around it -------------------------------------------------------------------------------------------

    @property
    def launch(self) -> LaunchWorld:
        """The group that this process stands in while it is idle."""
        return self.surroundings.launch

    @property
    def membership(self) -> Membership:
        """Who trains together with this process."""
        membership: Membership = self.job.membership
        return membership

    @property
    def candidates(self) -> Candidates:
        """Who could work at present."""
        return self.surroundings.candidates

    @property
    def control(self) -> Control:
        """The notice board of the present generation."""
        return self.surroundings.control

    # ---- where a process has several engines -------------------------------------------------------------------------

    def turn(self) -> AbstractContextManager[None]:
        """A block in which `torch.distributed`, DeepSpeed and the random generators are this engine's.

        They are in all of its calls. Code of your own needs it only where a process has several engines, and there
        only to ask `torch.distributed` about this engine's world, or to draw from its random streams.
        """
        return self.turns.of(self)

    def speak(self) -> None:
        """Let `torch.distributed` and DeepSpeed speak of this engine's world."""
        if self.world is None:
            self.launch.install()
        else:
            install(self.world)

    @property
    def has_stood(self) -> bool:
        """Whether it has come to a boundary yet."""
        return self._has_stood

    @property
    def is_switching(self) -> bool:
        """Whether a switch is being prepared."""
        return self._switcher.is_busy

    # ---- what a user reads -------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether this member holds no state now and waits for work."""
        return self.world is None

    @property
    def generation(self) -> int:
        """Number of the present world, from 1."""
        return self.world.generation if self.world is not None else self._switcher.attempt

    @property
    def era(self) -> str:
        """See `Switcher.era`."""
        return self._switcher.era

    @property
    def rank(self) -> int:
        """This member's place in the world (-1 on an idle member)."""
        return -1 if self.world is None or self.world.rank is None else self.world.rank

    @property
    def data_rank(self) -> int:
        """This member's place on the data axis (-1 on an idle member); ranks that share it get the same samples."""
        return -1 if self.idle else self.layout.coordinate(self.rank)["data"]

    @property
    def data(self) -> int:
        """Size of the data axis."""
        return self.layout.data

    @property
    def sequence_rank(self) -> int:
        """This member's place on the sequence axis (-1 on an idle member): which part of each sequence is its own."""
        return -1 if self.idle else self.layout.coordinate(self.rank)["sequence"]

    @property
    def sequence(self) -> int:
        """Size of the sequence axis: in how many parts a sequence is cut."""
        return self.layout.sequence

    @property
    def batch(self) -> BatchArithmetic:
        """How a global batch is dealt in the present world."""
        return self.batch_for(self.layout)

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step: `train_batch_size` of the configuration, in every world."""
        return int(self.job.batch_sizes.train_batch_size)

    @property
    def vps(self) -> VirtualParameterSpace:
        """The Virtual Parameter Space of the model under the present layout and members."""
        space: VirtualParameterSpace = self._space
        return space.with_layout(self.layout, self.members)

    # ---- for the rest of the package ---------------------------------------------------------------------------------

    @property
    def is_void(self) -> bool:
        """Whether the world was formed anew in this global batch: it trains nothing, and will be dealt again."""
        return self._window.is_void

    @property
    def _window_is_open(self) -> bool:
        """Whether something was dealt or accumulated since the last optimizer step."""
        return self._dealt or self.micro_steps % int(self.gradient_accumulation_steps()) != 0

    @property
    def is_in_epoch(self) -> bool:
        """Whether the script goes through a train loader."""
        return any(loader.has_begun for loader in self.train_loaders.values())

    @property
    def has_open_window(self) -> bool:
        """Whether it is in a global batch; what holds the whole state is between two of them."""
        return self._window_is_open

    def save_before_the_end(self) -> None:
        """Another engine of this process is about to end the script: the fallback checkpoint, if there is to be one."""
        if self.has_open_window:
            logger.warning("no fallback checkpoint of step %d: a global batch is open", self.global_steps)
            return
        with self.turn():
            self._switcher.save_now()

    def save_beside(self, tag: str, key: str, in_background: bool) -> None:
        """The first engine of this process saves a fallback checkpoint, and this one with it."""
        with self.turn():
            self._switcher.save_beside(tag, key, in_background)

    def note_window(self) -> None:
        """A global batch that is void is dealt again from where the loaders are now."""
        self._window.note()

    def end_void(self) -> None:
        """From here on what is dealt trains again."""
        self._window.is_void = False

    def enter(self, proposal: Proposal, world: World | None) -> None:
        """Become part of a committed world, or idle; called by the transaction."""
        self.world, self.layout, self.members = world, proposal.layout, proposal.members

    def take_shape(
        self, space: VirtualParameterSpace, layout: Layout, rank: int, made: Made | None = None
    ) -> Replaced | None:
        """`reshape` to a rank of a layout, whose world must be installed."""
        return self.reshape(layout, rank, space.local(layout, rank).tensors, made)

    def keep_arrived(self, loaders: dict[str, Any], objects: dict[str, Any]) -> None:
        """States of loaders and carried objects by name: what is not there yet gets its own when it is made."""
        self._arrived = {
            "loaders": {name: state for name, state in loaders.items() if name not in self.train_loaders},
            "objects": {name: state for name, state in objects.items() if name not in self.carried},
        }

    def begin_anew(self, generation: int) -> None:
        """No window is open and no change is pending, whatever was; numbers up to `generation` are used up."""
        self._dealt, self._window_samples, self._last_dealt = False, None, True
        self.slot_weight, self.slot_is_borrowed, self.window_tokens = 1.0, False, None
        self._switcher.begin_anew(generation)

    def types_in(self, layout: Layout) -> dict[str, torch.dtype]:
        """Element type of each state kind under a layout."""
        return self._switcher.types(layout)

    def room_for(self, layout: Layout, members: tuple[int, ...]) -> dict[int, int]:
        """Bytes that each member would allocate for a layout, at most."""
        return self._switcher.needs(layout, members)

    def adopt_space(self, space: VirtualParameterSpace) -> None:
        """Register other logical tensors."""
        self._space = space

    def config_for(self, layout: Layout) -> tuple[dict[str, Any], Any]:
        """DeepSpeed's configuration of a layout, as a dictionary and parsed; made once."""
        configs: dict[Layout, tuple[dict[str, Any], Any]] = self._configs
        if layout not in configs:
            config = copy.deepcopy(self.job.user_config)
            self.shaper.configure(config, layout)
            configs[layout] = layout_config(config, layout, self.batch_for(layout))
        return configs[layout]

    def batch_for(self, layout: Layout) -> BatchArithmetic:
        """How a global batch is dealt under a layout."""
        sizes = self.job.batch_sizes
        return BatchArithmetic(sizes.train_batch_size, sizes.micro_batch_size, layout.data)
