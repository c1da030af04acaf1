"""Find out what stock DeepSpeed can train: try every combination of axes and ZeRO stages, for each kind of model.

python tools/feasibility.py                                # all of it: about half an hour on two cores
python tools/feasibility.py --kinds ulysses --seconds 100  # a part of it
python tools/feasibility.py --write docs/dev    # put the table into the page, once all of it was tried

Results are kept in a file and not tried again, so an interrupted run can be continued.

Each combination is built by `deepspeed.initialize` in processes of its own, which are forked off a process that has
imported everything. It trains STEPS steps by SGD, in fp32, first without and then with clipping. It counts as trained
if its losses equal those of one rank without ZeRO. Otherwise the table has the first line of DeepSpeed's error, or says
what is wrong: the gradients, or only their clipping.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as td
from feasibility_models import BATCH, KINDS, Kind
from figures import keep, machine, table
from torch._C._distributed_c10d import FileStore

from ds_dynatrain.space import Layout
from ds_dynatrain.space.layout import RANK_ORDER, STAGES

STEPS = 4
TOLERANCE = 1e-4
"""Largest relative difference of losses from those of one rank, which covers clipping and other orders of sums."""
LIMIT_SECONDS = 90.0
GRACE_SECONDS = 10.0
CLIPPING = 0.1
"""Clipping threshold, which is below the norm of the gradients in every step."""
PASSING = r"\[[^\]]*(\.cc:\d+|[\d.]+)\](:\d+)?|\(expected .*"
"""Parts of messages that differ in each run: addresses and sizes."""
LATE = r"(?i)connection|gloo/transport|a process died"
"""Errors of a rank that result from the failure of another one."""
OK = "ok"
DIED = "a process died"
CLIPS_WRONG = "trains, and clips gradients by another norm than that of the whole model"
TRAINS_WRONG = "trains, and its losses are not those of one rank"


@dataclass(frozen=True)
class Found:
    """The result for one combination.

    words: "ok", or the reason why it does not train.
    """

    kind: str
    layout: Layout
    words: str


def layouts(kind: Kind, processes: int) -> Iterator[Layout]:
    """Yield every combination of sizes of the kind's axes that needs at most this many ranks, with every ZeRO stage."""
    sizes = [range(1, processes + 1) if axis in kind.axes else (1,) for axis in RANK_ORDER]
    for chosen in itertools.product(*sizes):
        place: dict[str, Any] = dict(zip(RANK_ORDER, chosen, strict=True))
        if math.prod(chosen) > processes:
            continue
        width = place["data"] * place["sequence"] * (place["tensor"] if kind.folds else 1)
        for expert in range(1, width + 1) if "expert" in kind.axes else (1,):
            if width % expert == 0:
                yield from (Layout(**place, expert=expert, zero_stage=stage) for stage in STAGES)


# ---- one rank -------------------------------------------------------------------------------------------------------


def config(layout: Layout, clipping: float) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with one micro-batch per step. It uses SGD, with which gradients that are wrong
    by a factor change the losses.
    """
    return {
        "train_micro_batch_size_per_gpu": BATCH // layout.data,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": clipping,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 2.0 if clipping else 0.2}},
        "zero_optimization": {"stage": layout.zero_stage, "stage3_param_persistence_threshold": 40},
    }


def train(kind: Kind, layout: Layout, clipping: float, rank: int, folder: str) -> list[float]:
    """Train, and return this rank's loss in each step."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": layout.world_size}
    os.environ.update({name: str(value) for name, value in names.items()})
    store = FileStore(f"{folder}/store", layout.world_size)
    td.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size)
    deepspeed.init_distributed()
    sizes, place = layout.axes(), layout.coordinate(rank)
    engine = kind.start(sizes, config(layout, clipping))
    return [kind.step(engine, sizes, place, step) for step in range(STEPS)]


def run_rank(kind: Kind, layout: Layout, clipping: float, rank: int, folder: str, pipe: Connection) -> None:
    """Train, and send the losses or the error through the pipe. Ends the process."""
    output = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        pipe.send((None, train(kind, layout, clipping, rank, folder)))
    except BaseException as error:
        pipe.send((said(error), []))
    os._exit(0)


def said(error: BaseException) -> str:
    """Return the first line of an error, or the line that raised it if its text is empty."""
    lines = str(error).strip().splitlines()
    if lines:
        return f"{type(error).__name__}: {re.sub(PASSING, '', lines[0]).strip()}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {frame.line} ({'/'.join(Path(frame.filename).parts[-3:])})"


# ---- all ranks ------------------------------------------------------------------------------------------------------


def attempt(kind: Kind, layout: Layout, clipping: float) -> tuple[str | None, list[float]]:
    """Train one combination. Return (first error of a rank or None, mean losses over the data and sequence axes)."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="dynatrain-feasibility-") as folder:
        pipes, ranks = [], []
        for rank in range(layout.world_size):
            here, there = context.Pipe(duplex=False)
            arguments = (kind, layout, clipping, rank, folder, there)
            ranks.append(context.Process(target=run_rank, args=arguments, daemon=True))
            ranks[-1].start()
            there.close()
            pipes.append(here)
        try:
            return collect(pipes)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def collect(pipes: list[Connection]) -> tuple[str | None, list[float]]:
    """Wait for all ranks, and return the result of `attempt`. After a failure, the others have a few more seconds."""
    answers: dict[Any, list[float]] = {}
    errors: list[str] = []
    end = time.monotonic() + LIMIT_SECONDS
    while len(answers) < len(pipes):
        ready: list[Any] = wait([pipe for pipe in pipes if pipe not in answers], max(0.0, end - time.monotonic()))
        if not ready:
            return first(errors) or "hangs", []
        for pipe in ready:
            try:
                failed, losses = pipe.recv()
            except EOFError:
                failed, losses = DIED, []
            answers[pipe] = losses
            if failed is not None:
                errors.append(failed)
                end = min(end, time.monotonic() + GRACE_SECONDS)
    if errors:
        return first(errors), []
    return None, [sum(each) / len(pipes) for each in zip(*answers.values(), strict=True)]


def first(errors: list[str]) -> str | None:
    """Return the error that explains the failure best; errors are in the order in which they came."""
    own = [error for error in errors if not re.search(LATE, error)]
    return next(iter(own), DIED if errors else None)


class Survey:
    """All combinations for one kind of model."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._alone: dict[float, list[float]] = {}

    def judge(self, layout: Layout) -> Found:
        """Try one combination, and return the result."""
        words = self._words(layout, 0.0)
        if words == OK and self._words(layout, CLIPPING) != OK:
            words = CLIPS_WRONG
        print(f"{self.kind.name}: {layout}: {words}", flush=True)
        return Found(self.kind.name, layout, words)

    def _expected(self, clipping: float) -> list[float]:
        """Return the losses of one rank without ZeRO. Raises SystemExit if it does not train."""
        if clipping not in self._alone:
            error, self._alone[clipping] = attempt(self.kind, Layout(zero_stage=0), clipping)
            if error is not None:
                raise SystemExit(f"{self.kind.name} does not train on one rank: {error}")
        return self._alone[clipping]

    def _words(self, layout: Layout, clipping: float) -> str:
        error, losses = attempt(self.kind, layout, clipping)
        if error is not None:
            return error
        pairs = zip(losses, self._expected(clipping), strict=True)
        return OK if max(abs(one - other) / abs(other) for one, other in pairs) <= TOLERANCE else TRAINS_WRONG


def markdown(found: list[Found]) -> str:
    """Return one table for all kinds of models. Combinations of a kind with the same results in every stage share a
    line.
    """
    reasons = list(dict.fromkeys(each.words for each in found if each.words != OK))
    cells: dict[tuple[str, str], list[str]] = {}
    for each in found:  # the stages of a combination follow one another
        axes = " ".join(f"{axis}={size}" for axis, size in each.layout.axes().items() if size != 1) or "data=1"
        mark = OK if each.words == OK else f"({reasons.index(each.words) + 1})"
        cells.setdefault((each.kind, axes), []).append(mark)
    lines: dict[tuple[str, ...], list[str]] = {}
    for (kind, axes), marks in cells.items():
        lines.setdefault((kind, *marks), []).append(axes)
    rows = [[kind, ", ".join(axes), *marks] for (kind, *marks), axes in lines.items()]
    text = table(["model", "axes", *(f"stage {stage}" for stage in STAGES)], rows)
    notes = "\n".join(f"{number}. `{words}`" for number, words in enumerate(reasons, 1))
    return f"{text}\n\n{notes}"


def known(file: Path) -> dict[tuple[str, Layout], Found]:
    """Return the results that a file holds."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    read = [Found(kind, Layout.from_dict(sizes), words) for kind, sizes, words in map(json.loads, lines)]
    return {(each.kind, each.layout): each for each in read}


def note(file: Path, found: Found) -> None:
    """Append a result to the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as output:
        output.write(json.dumps([found.kind, found.layout.to_dict(), found.words]) + "\n")


def main() -> None:
    """Try the requested combinations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS], default=[k.name for k in KINDS])
    parser.add_argument("--processes", type=int, default=4, help="the most ranks of a combination")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no combination after that time")
    parser.add_argument("--results", type=Path, default=Path("build/feasibility.jsonl"), help="what was found before")
    parser.add_argument("--write", type=Path, help="a page, or a folder of them, for the table of all kinds: docs/dev")
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    prepare()
    every = [(kind, layout) for kind in KINDS for layout in layouts(kind, asked.processes)]
    found, surveys = known(asked.results), {kind.name: Survey(kind) for kind in KINDS}
    for kind, layout in every:
        if kind.name in asked.kinds and (kind.name, layout) not in found and time.monotonic() < end:
            note(asked.results, surveys[kind.name].judge(layout))
    found = known(asked.results)
    there = [found[kind.name, layout] for kind, layout in every if (kind.name, layout) in found]
    print(f"{len(there)} of {len(every)} combinations were tried\n\n{markdown(there)}", flush=True)
    if asked.write and len(there) == len(every):
        keep(asked.write, "feasibility", f"Measured on: {machine()}.\n\n{markdown(there)}")


def prepare() -> None:
    """Import everything that ranks need, before they are forked."""
    import deepspeed.runtime.zero.muon.original_muon
    import torch._dynamo

    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    gc.freeze()


if __name__ == "__main__":
    main()
