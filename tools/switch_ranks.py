"""One rank of `bench_switch.py`: makes a list of changes in running ranks, and records what each cost.

torchrun ... switch_ranks.py FOLDER '{"size": "30M", "dtype": "bf16", "walk": [...], "start": {...}, "repeats": 3}'

"variant", if given, names a variant of variants.py.
"""

from __future__ import annotations

import cProfile
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import deepspeed
import memory
import torch.distributed as td
from axes import AXES
from launch import Notes
from minimum import bytes_minimum, bytes_sent
from raw import RawTransport
from variants import VARIANTS, allow_fp16, gpt_step, model_of, settings_of
from workload import SIZES, Samples, config, quiet

import ds_dynatrain
from ds_dynatrain.membership.session import VoteResult
from ds_dynatrain.plan import plan_switch
from ds_dynatrain.reshard.switch import Transaction

BATCH, LENGTH = 12, 8
T = TypeVar("T")


class Watch:
    """Measurements of every switch on this member.

    last: the measurements of the latest switch.
    transaction: that switch.
    """

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.last: dict[str, Any] = {}
        self.transaction: Transaction | None = None
        self._profile = profile
        self._resident, self._begin = 0, 0.0

    def install(self) -> None:
        """Wrap `Transaction.vote` and `Transaction.conclude`."""
        watch, vote, conclude = self, Transaction.vote, Transaction.conclude

        def begin(self: Transaction, work: Callable[[], dict[str, Any]] | None = None) -> VoteResult:
            watch._resident = memory.resident()
            memory.reset_high_water()
            watch._begin = time.perf_counter()
            return watch._profiled(lambda: vote(self, work))

        def end(self: Transaction, decision: VoteResult) -> None:
            watch._profiled(lambda: conclude(self, decision))
            watch.measure(self)

        Transaction.vote, Transaction.conclude = begin, end  # type: ignore[method-assign]

    def measure(self, transaction: Transaction) -> None:
        """Record the measurements of a transaction. Raises RuntimeError if it was rolled back."""
        pause, outcome = time.perf_counter() - self._begin, transaction.outcome
        high_water = memory.high_water()
        if not outcome.committed or outcome.stats is None:
            raise RuntimeError(f"a switch of the walk was rolled back: {outcome.reason}")
        rounds, stats = transaction.preparation.moves(transaction.kinds).plan.rounds, outcome.stats
        self.transaction = transaction
        self.last = {
            "phases_ms": dict(outcome.phases_ms),
            "pause_ms": 1e3 * pause,
            "peers": {exchange.peer: (exchange.sends.nbytes, exchange.receives.nbytes) for exchange in rounds},
            "local_bytes": stats.bytes_local,
            "exchange_ms": 1e3 * stats.seconds_exchange,
            "local_ms": 1e3 * stats.seconds_local,
            "derived_ms": 1e3 * stats.seconds_derived,
            "certificate_ms": outcome.certificate_ms,
            "prepared_ms": 1e3 * transaction.preparation.seconds,
            "state_peak": outcome.peak_memory,
            "resident_high_water": high_water,
            "resident_growth": high_water - self._resident,
        }

    def _profiled(self, call: Callable[[], T]) -> T:
        return call() if self._profile is None else self._profile.runcall(call)


def least_bytes(transaction: Transaction, processes: int) -> dict[str, int]:
    """Return the fewest bytes for the chosen members, counted element by element, and for the best choice of members.

    A member at rank 0 keeps that rank if it stays; other choices are not considered.
    """
    proposal, vps, kinds = transaction.proposal, transaction.preparation.vps, transaction.kinds
    others = (member for member in range(processes) if member != vps.members[0])
    slots = itertools.permutations(others, proposal.layout.world_size - 1)
    best = min(bytes_sent(plan_switch(vps, proposal.layout, (vps.members[0], *rest), kinds)) for rest in slots)
    return {"minimum": bytes_minimum(vps, proposal.layout, proposal.members, kinds), "best_slots": best}


def main() -> None:
    """Train, and make the changes of the walk."""
    folder, wanted = sys.argv[1], json.loads(sys.argv[2])
    quiet()
    deepspeed.init_distributed(verbose=False)
    member, size = td.get_rank(), td.get_world_size()
    notes, raw = Notes(folder, member), RawTransport(member, size, wanted["transport"])
    profile = cProfile.Profile() if wanted.get("profile") == member else None
    watch = Watch(profile)
    watch.install()
    shape = SIZES[wanted["size"]]
    variant = {**VARIANTS, **AXES}.get(wanted.get("variant", ""))
    settings = settings_of(variant, config(wanted["dtype"], wanted["start"]["zero_stage"], BATCH))
    settings["dynatrain"] = {"layout": wanted["start"], "timeout_seconds": 120, "transport": wanted["transport"]}
    if wanted["dtype"] == "fp16":
        allow_fp16()
    data, model = Samples(10**6, LENGTH, shape["vocabulary"]), model_of(variant, shape)
    groups = variant.groups(model) if variant is not None and variant.groups is not None else None  # type: ignore[arg-type]
    engine, *_ = ds_dynatrain.initialize(model=model, model_parameters=groups, config=settings)
    batches = iter(engine.loader(data, num_workers=0, collate_fn=variant.collate if variant is not None else None))
    step = variant.step if variant is not None and variant.step is not None else gpt_step
    walk = wanted["walk"]
    counted: set[str] = set()

    def note(event: ds_dynatrain.SwitchEvent) -> None:
        change = walk[event.generation - 2]
        transaction, watch.transaction = watch.transaction, None
        if transaction is None:
            raise RuntimeError("an event without a switch")
        union = transaction.proposal.union
        record = {"change": change, "event": json.loads(event.to_json()), **watch.last}
        if change["name"] not in counted and member == transaction.proposal.source_members[0]:
            record.update(least_bytes(transaction, size))
        counted.add(change["name"])
        del transaction
        record["raw_seconds"] = raw.seconds(record["peers"], union, wanted["repeats"])
        notes.write(record)

    engine.on_switch(note)
    pending = None
    while True:
        step(engine, batches)
        if engine.global_steps < 2 or (pending is not None and not pending.done):
            continue
        done = engine.generation - 1
        if done == len(walk):
            break
        at = engine.global_steps if walk[done]["mode"] == "immediate" else None
        pending = engine.switch(at=at, **walk[done]["target"])
    if profile is not None:
        profile.dump_stats(wanted["profile_file"])


if __name__ == "__main__":
    main()
