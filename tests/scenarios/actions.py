"""What a script does between two steps, by the names that events of a scenario have for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.scenarios.models import decay_groups


@dataclass
class Seen:
    """What one rank saw of a run; the ranks that trained say the same where they have the same place.

    losses: optimizer step -> (rank, data index, loss, samples of its own) of each micro-batch. samples: optimizer
    step -> numbers of the samples that this rank trained. errors: "Class: text" of what events raised. switches: what
    `engine.on_switch` was told, and switches that were rolled back. ended: how the script ended, "" if it came to its
    end, else "Class: text".
    """

    losses: dict[int, list[tuple[int, int, float, int]]] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    switches: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    layout: str = ""
    ended: str = ""
    worked_last: bool = False

    def note(self, engine: Any, step: int, loss: torch.Tensor, numbers: torch.Tensor) -> None:
        """Keep the loss of a micro-batch, and which samples it was of."""
        found = engine.rank, engine.data_rank, loss.item(), len(numbers)
        self.losses.setdefault(step, []).append(found)
        self.samples.setdefault(step, []).extend(numbers.tolist())


@dataclass
class Scene:
    """A job in the middle of a run, as its events see it; done: the steps whose events have happened."""

    engine: Any
    folder: Path
    seen: Seen
    done: set[int] = field(default_factory=set)


def switch(scene: Scene, **given: Any) -> None:
    """Ask for a layout that takes effect at once; the state before it is kept for the comparison with a load."""
    now = scene.engine.global_steps
    scene.engine.switch(**{"at": now, **given})


def save(scene: Scene, into: str = "before", **given: Any) -> None:
    """Save a checkpoint into a folder of the run."""
    saved = scene.engine.save(scene.folder / into, **given)
    if given.get("background"):
        saved.wait()


def save_stock(scene: Scene, into: str = "stock", **given: Any) -> None:
    """Save a checkpoint of DeepSpeed's own."""
    scene.engine.save_checkpoint(str(scene.folder / into), **given)


def load(scene: Scene, folder: str = "before", **given: Any) -> None:
    """Go back to what was saved in a folder of the run."""
    scene.engine.load(scene.folder / folder, **given)


def plan(scene: Scene, **given: Any) -> None:
    """Ask what a switch would cost, or why it would be refused."""
    estimate = scene.engine.plan(**given)
    scene.seen.notes["plan"] = {
        "sent": estimate.bytes_sent,
        "members": list(estimate.members or ()),
        "refusal": str(estimate.refusal or ""),
    }


def freeze(scene: Scene, prefix: str, trained: bool = False) -> None:
    """Freeze the parameters whose names begin with `prefix`, or train them again."""
    for name, parameter in scene.engine.module.named_parameters():
        if name.startswith(prefix):
            parameter.requires_grad_(trained)
    scene.engine.update_param_groups()


def regroup(scene: Scene, decay: float) -> None:
    """Give the optimizer other groups: matrices decay, vectors do not."""
    scene.engine.update_param_groups(decay_groups(scene.engine.module, decay))


def set_rate(scene: Scene, rate: float) -> None:
    """Set the learning rate of every group."""
    for group in scene.engine.optimizer.param_groups:
        group["lr"] = rate


def flip(scene: Scene, name: str, member: int) -> None:
    """Change one element of a weight on one member alone."""
    if scene.engine.member == member:
        with torch.no_grad():
            dict(scene.engine.module.named_parameters())[name].view(-1)[0] += 1.0


ACTIONS: Mapping[str, Callable[..., None]] = {
    each.__name__: each for each in (switch, save, save_stock, load, plan, freeze, regroup, set_rate, flip)
}
