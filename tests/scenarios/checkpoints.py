"""Scenarios of checkpoints: ours, those that are saved by themselves, and DeepSpeed's, in both directions."""

from __future__ import annotations

from typing import Any

from tests.scenarios.row import BF16, FP16, Command, Event, Layout, Row, Run, full, layout, words

BEFORE, END = "{row}/run/before", "{row}/run/end"
FALLBACK = {"dynatrain": {"fallback": {"path": "{folder}/fallback", "every_steps": 4, "keep": 1}}}
SIGTERM = {"dynatrain": {"fallback": {"path": "{folder}/fallback", "every_steps": 100, "on_sigterm": True}}}
RESUME = {"dynatrain": {"resume": {"path": "{row}/run/fallback"}}}
STOCK = {"train_micro_batch_size_per_gpu": None}
UNIVERSAL = {**STOCK, "checkpoint": {"load_universal": True}}
SAVED = (Event(3, "save"),)


def loaded(one: Layout, other: Layout, **of_run: Any) -> Row:
    """Return a checkpoint that a job in another layout holds, bit for bit, once it has loaded it."""
    run = Run(one, events=SAVED, steps=4, **of_run)
    again = Run(other, load=BEFORE, steps=3, **of_run)
    name = f"load: {run.model} {' '.join(run.config)} {words(one)} in {words(other)}"
    return Row(name, run, (again,), undisturbed="start", alike=((BEFORE, "{row}/then1/end"),))


def resumed(one: Layout, other: Layout) -> Row:
    """Return a job that goes on in another layout, as its configuration says."""
    again = Run(other, config={"dynatrain": {"resume": {"path": BEFORE}}})
    return Row(
        f"resume: {words(one)} in {words(other)}", Run(one, events=SAVED, steps=4), (again,), undisturbed=STARTED
    )


STARTED = Run(layout(4, 1), config=STOCK, loop="stock")
IN_ORDER = Run(layout(4, 1), config=STOCK, loop="stock in order")


def to_stock(stage: int) -> Row:
    """Return a checkpoint of `engine.save_checkpoint` that plain DeepSpeed goes on from."""
    theirs = Run(layout(4, stage), config=STOCK, loop="stock", load_stock="{row}/run/stock")
    run = Run(layout(2, 1), events=(Event(1, "switch", layout(4, stage)), Event(3, "save_stock")), steps=4)
    return Row(f"to DeepSpeed: stage {stage}", run, (theirs,), ends=layout(4, stage), undisturbed=STARTED)


def from_stock(stage: int, other: Layout) -> Row:
    """Return a checkpoint of plain DeepSpeed that a job goes on from in another layout."""
    theirs = Run(layout(4, stage), config=STOCK, loop="stock in order", steps=3)
    ours = Run(other, loop="boundary", load_stock="{row}/run/stock")
    return Row(f"from DeepSpeed: stage {stage} in {words(other)}", theirs, (ours,), undisturbed=IN_ORDER)


ROWS = (
    loaded(layout(2, 1), layout(4, 3)),
    *full(loaded(layout(4, 3), layout(3, 0))),
    *full(loaded(layout(2, 2), layout(4, 1), config=BF16), loaded(layout(4, 1), layout(2, 3), config=FP16)),
    *full(loaded(layout(2, 1, tensor=2), layout(4, 3), model="llama")),
    *full(loaded(layout(2, 1, pipe=2), layout(1, 1, pipe=3), model="pipeline")),
    *full(loaded(layout(4, 1, expert=2), layout(4, 3, expert=4), model="mixtral")),
    *full(
        resumed(layout(2, 1), layout(4, 3)), resumed(layout(4, 3), layout(2, 2)), resumed(layout(3, 2), layout(3, 2))
    ),
    to_stock(3),
    *full(to_stock(0), to_stock(1), to_stock(2)),
    from_stock(3, layout(2, 1)),
    *full(from_stock(0, layout(2, 3)), from_stock(1, layout(3, 2)), from_stock(2, layout(4, 0))),
    Row(
        "to DeepSpeed: its universal format",
        Run(layout(2, 1), events=SAVED, steps=4),
        (
            Command(("checkpoint", "convert", BEFORE, "{row}/theirs", "--to", "deepspeed-universal")),
            Run(layout(4, 2), config=UNIVERSAL, loop="stock", load_stock="{row}/theirs"),
        ),
        undisturbed=STARTED,
    ),
    Row(
        "from DeepSpeed: by the command",
        Run(layout(4, 2), config=STOCK, loop="stock in order", steps=3),
        (
            Command(("checkpoint", "convert", "{row}/run/stock", "{row}/ours", "--to", "universal")),
            Run(layout(2, 3), loop="boundary", load="{row}/ours"),
        ),
        undisturbed=IN_ORDER,
    ),
    Row(
        "in the background",
        Run(layout(4, 2), events=(*SAVED, Event(3, "save", {"into": "background", "background": True})), steps=4),
        (Command(("checkpoint", "verify", "{row}/run/background")),),
        alike=((BEFORE, "{row}/run/background"),),
    ),
    Row(
        "back to an earlier step",
        Run(layout(4, 3), events=(Event(2, "save"), Event(4, "load"))),
        undisturbed="start",
        bound=0.0,
        alike=((END, "{undisturbed}/end"),),
        full=True,
    ),
    Row(
        "back to an earlier step, in another layout",
        Run(layout(2, 1), events=(Event(2, "save"), Event(3, "switch", layout(4, 3)), Event(4, "load"))),
        ends=layout(4, 3),
    ),
    Row(
        "saved by itself",
        Run(layout(2, 1), config=FALLBACK),
        (Run(layout(4, 3), config=RESUME),),
    ),
    Row(
        "saved on SIGTERM",
        Run(layout(4, 2), config=SIGTERM, events=(Event(3, "terminate", {"member": 1}),)),
        (Run(layout(2, 1), config=RESUME),),
        fails="SystemExit: 143",
    ),
    Row(
        "a flipped byte, found by the command",
        Run(layout(2, 1), events=SAVED, steps=4),
        (
            Command(("checkpoint", "inspect", BEFORE), prints="step 3, saved in data=2"),
            Command(("checkpoint", "verify", BEFORE)),
            Command(("checkpoint", "verify", BEFORE), code=1, damages=BEFORE),
        ),
    ),
    Row(
        "a flipped byte, found by a load that changes nothing",
        Run(
            layout(4, 1),
            events=(
                Event(2, "save"),
                Event(3, "damage", {"folder": "before"}),
                Event(3, "load", raises="CheckpointDamaged"),
            ),
        ),
    ),
    Row(
        "a folder without a checkpoint",
        Run(layout(2, 1), events=(Event(2, "load", {"folder": "nowhere"}, raises="CheckpointError"),), steps=4),
    ),
    Row(
        "a checkpoint of another model",
        Run(layout(2, 1), events=SAVED, steps=4),
        (Run(layout(2, 1), "ulysses", events=(Event(1, "load", {"folder": BEFORE}, "CheckpointError"),), steps=2),),
        bound=None,
    ),
)
