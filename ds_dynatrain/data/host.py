"""What a loader needs to know from whoever runs the training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from ds_dynatrain.data.batch import BatchArithmetic, Slot

if TYPE_CHECKING:
    from ds_dynatrain.data.evaluation import EvaluationLoader
    from ds_dynatrain.data.loader import TrainLoader


class Host(Protocol):
    """The present world as a loader sees it. It may change inside `before_batch` and `before_micro_batch`, and
    nowhere else.

    On an idle member `data_rank` means nothing; `batch` is still asked for its `train_batch_size`, which no world
    changes.
    """

    @property
    def data_rank(self) -> int:
        """This member's index on the data axis, 0 to data - 1; members that share it get the same samples."""

    @property
    def batch(self) -> BatchArithmetic:
        """How a global batch is dealt in the present world."""

    @property
    def generation(self) -> int:
        """The number of the world; a loader deals its batches anew when it has changed."""

    @property
    def idle(self) -> bool:
        """Whether this member holds no state now."""

    def turn(self) -> AbstractContextManager[None]:
        """Around whatever a loader does: the process's random streams are those of this job in it."""

    def begin_epoch(self, loader: TrainLoader) -> int | None:
        """Return which epoch the sampler is set to, as the job has it. Called by `iter` of a train loader.

        None on a member that came late, if the others have left their loops: it gets no batch.
        """

    def begin_evaluation(self, loader: EvaluationLoader) -> bool:
        """The same for a pass over an evaluation loader, which the others may not be making."""

    def before_micro_batch(self) -> None:
        """Called before every micro-batch; it may set a loader back to the start of its global batch."""

    def before_batch(self, loader: TrainLoader) -> None:
        """Called before the first micro-batch of a global batch that exists; a pending change takes effect here.

        On an idle member it returns once the member works again and `loader.load_state_dict` has set the position. A
        host that lets a member wait calls `loader.close()` first, so that no worker process waits with it.
        """

    def deal(self, slot: Slot, first: bool, last: bool) -> None:
        """Told the slot of the micro-batch about to be returned, and whether it opens or closes its global batch."""

    def open_batch(self, slots: Sequence[Slot]) -> None:
        """Told this rank's slots of a global batch that is drawn at once; each is dealt later."""
