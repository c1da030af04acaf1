"""What a script does between two steps, by the names that events of a scenario have for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.scenarios.models import Texts


@dataclass
class Seen:
    """What one rank saw of a run; the ranks that trained say the same where they have the same place.

    losses: optimizer step -> (rank, data index, loss, samples of its own) of each micro-batch. samples: optimizer
    step -> numbers of the samples that this rank trained. awaited: what errors had to say, of the events that this rank
    had a part in. errors: "Class: text" of what these raised. switches: what
    `engine.on_switch` was told, and switches that were rolled back. ended: how the script ended, "" if it came to its
    end, else "Class: text".
    """

    losses: dict[int, list[tuple[int, int, float, int]]] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)
    awaited: list[str] = field(default_factory=list)
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
class Counter:
    """An object of the script's own, which goes where the state goes: it counts optimizer steps."""

    steps: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


@dataclass
class Scene:
    """A job in the middle of a run, as its events see it; done: the steps whose events have happened."""

    engine: Any
    folder: Path
    seen: Seen
    counter: Counter
    done: set[tuple[int, bool]] = field(default_factory=set)


def switch(scene: Scene, **given: Any) -> None:
    """Ask for a layout, which takes effect before the next batch unless `at` says otherwise."""
    scene.engine.switch(**{"at": scene.engine.global_steps, **given})


def save(scene: Scene, into: str = "before", **given: Any) -> None:
    """Save a checkpoint into a folder of the run."""
    saved = scene.engine.save(scene.folder / into, **given)
    if given.get("background"):
        saved.wait()


def save_stock(scene: Scene, into: str = "stock", **given: Any) -> None:
    """Save a checkpoint of DeepSpeed's own."""
    scene.engine.save_checkpoint(str(scene.folder / into), **given)


def load(scene: Scene, folder: str = "before", **given: Any) -> None:
    """Go back to what was saved in a folder of the run; the steps that are made again count once."""
    scene.done |= {(step, within) for step in range(scene.engine.global_steps + 1) for within in (False, True)}
    scene.engine.load(scene.folder / folder, **given)
    for kept in (scene.seen.losses, scene.seen.samples):
        for step in [step for step in kept if step >= scene.engine.global_steps]:
            del kept[step]


def damage(scene: Scene, folder: str) -> None:
    """Flip a byte in the middle of the largest file of a folder."""
    if scene.engine.rank == 0:
        flip(scene.folder / folder)
    dist.barrier()


def flip(folder: Path) -> None:
    """Flip a byte in the middle of the largest file in a folder."""
    file = max((each for each in folder.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def plan(scene: Scene, **given: Any) -> None:
    """Ask what a switch would cost; why it would be refused is noted, and members of the new layout are counted."""
    estimate = scene.engine.plan(**given)
    name = " ".join(["plan", *(f"{key}={value}" for key, value in given.items())])
    scene.seen.notes[name] = estimate.refusal
    if not estimate.refusal and len(set(estimate.members)) != estimate.layout.world_size:
        raise AssertionError(f"{name}: {estimate.members} hold {estimate.layout}")


def evaluate(scene: Scene) -> None:
    """Evaluate all samples in the present world, and note how many there were."""
    engine, samples = scene.engine, 0
    loader = engine.loader(Texts(), evaluation=True, num_workers=0)
    engine.eval()
    with torch.no_grad():
        for _, inputs, targets in loader:
            engine(inputs, targets)
            samples += loader.samples
    engine.train()
    total = torch.tensor(float(samples))
    dist.all_reduce(total)
    scene.seen.notes.setdefault("evaluated", []).append(int(total))


def terminate(scene: Scene, member: int) -> None:
    """Send SIGTERM to one process of the job."""
    if scene.engine.member == member:
        os.kill(os.getpid(), signal.SIGTERM)


def resize(scene: Scene) -> None:
    """Ask for another batch size."""
    scene.engine.set_train_batch_size(24)


def save_profile(scene: Scene) -> None:
    """Save what layers take."""
    if scene.engine.rank == 0:
        scene.engine.balancer.profile.save(scene.folder / "profile.json")


def suggest(scene: Scene) -> None:
    """Note whether any layout is suggested, and whether none of them would be refused."""
    found = [each.layout for each in scene.engine.suggest()]
    scene.seen.notes["suggested"] = bool(found) and not any(scene.engine.plan(each).refusal for each in found)


def freeze(scene: Scene, prefix: str, trained: bool = False) -> None:
    """Freeze the parameters whose names begin with `prefix`, or train them again."""
    for name, parameter in scene.engine.module.named_parameters():
        if name.startswith(prefix):
            parameter.requires_grad_(trained)
    scene.engine.update_param_groups()


def regroup(scene: Scene, prefix: str, decay: float) -> None:
    """Train frozen parameters again, in a group of their own."""
    found = [held for name, held in scene.engine.module.named_parameters() if name.startswith(prefix)]
    for parameter in found:
        parameter.requires_grad_(True)
    scene.engine.update_param_groups([{"params": found, "like": 0, "weight_decay": decay}])


def set_rate(scene: Scene, rate: float) -> None:
    """Set the learning rate of every group."""
    for group in scene.engine.optimizer.param_groups:
        group["lr"] = rate


def drift(scene: Scene, name: str, member: int) -> None:
    """Change one element of a weight on one member alone."""
    if scene.engine.member == member:
        with torch.no_grad():
            dict(scene.engine.module.named_parameters())[name].view(-1)[0] += 1.0


_ALL = (switch, save, save_stock, load, damage, plan, evaluate, terminate, resize, save_profile, suggest)
ACTIONS: Mapping[str, Callable[..., None]] = {each.__name__: each for each in (*_ALL, freeze, regroup, set_rate, drift)}
