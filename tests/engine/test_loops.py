"""What a training loop does besides: epochs, schedulers, optimizers of its own, evaluation, monitors, tokens."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LinearLR, SequentialLR, StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.engine import jobs
from tests.engine.models import LENGTH, Sequences, decay_groups, small_gpt
from tests.engine.pool import RankPool

WARM_UP = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 3e-3}}
DECAY = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 3e-3, "total_num_steps": 12}}
SCHEDULE = {2: (4, 3), 4: (1, 2), 6: (3, 0)}
STEPS = 8


def configured_case(more: dict[str, Any], schedule: jobs.Schedule) -> jobs.Record:
    return jobs.run(jobs.config(**more), STEPS, schedule)


def rates(records: list[jobs.Record | None]) -> dict[int, list[float]]:
    """Learning rates by step; all ranks that took a step agree."""
    found: dict[int, list[float]] = {}
    for record in records:
        for step, values in (record.rates if record else {}).items():
            assert found.setdefault(step, values) == values, f"step {step}"
    return dict(sorted(found.items()))


@pytest.mark.parametrize(
    "scheduler", [WARM_UP, pytest.param(DECAY, marks=pytest.mark.full)], ids=lambda given: given["type"]
)
def test_scheduler_in_its_warm_up(pool: RankPool, scheduler: dict[str, Any]) -> None:
    switched = pool.run(configured_case, more={"scheduler": scheduler}, schedule=SCHEDULE)
    static = pool.run(configured_case, more={"scheduler": scheduler}, schedule={})
    assert rates(switched) == rates(static) and len(rates(static)) == STEPS
    assert len({values[0] for values in rates(static).values()}) > 5, "the rate moves"
    assert jobs.furthest(jobs.global_losses(switched), jobs.global_losses(static)) <= 1e-6


def own_objects_case(scheduler: str, schedule: jobs.Schedule) -> jobs.Record | None:
    """The user's optimizer object, and a torch scheduler as object or as function of the optimizer."""
    model = small_gpt()
    optimizer = torch.optim.AdamW(decay_groups(model), lr=2e-3, betas=(0.8, 0.98))
    made_by_user: Any = StepLR(optimizer, 2, 0.7)
    if scheduler == "function":

        def made_by_user(basic: torch.optim.Optimizer) -> LambdaLR:
            return LambdaLR(basic, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])

    settings = jobs.config()
    del settings["optimizer"]
    record = jobs.Record()
    with jobs.job(settings, model=model, optimizer=optimizer, lr_scheduler=made_by_user) as made:
        jobs.train(made, STEPS, schedule, record)
        record.notes["same"] = made.optimizer.basic is optimizer and made.engine.basic_optimizer is optimizer
        record.notes["last"] = made.scheduler.get_last_lr()
    return record


@pytest.mark.parametrize("scheduler", ["object", pytest.param("function", marks=pytest.mark.full)])
def test_own_optimizer_and_scheduler(pool: RankPool, scheduler: str) -> None:
    switched = pool.run(own_objects_case, scheduler=scheduler, schedule=SCHEDULE)
    static = pool.run(own_objects_case, scheduler=scheduler, schedule={})
    assert rates(switched) == rates(static)
    assert switched[0].notes == static[0].notes and switched[0].notes["same"]
    assert jobs.furthest(jobs.global_losses(switched), jobs.global_losses(static)) <= 1e-6


def cyclic_case(folder: str) -> list[list[float]]:
    """Schedulers that take things out of the state that they are given: the rates of steps made twice, after a load."""
    settings, rates = jobs.config(start=(4, 1)), dict[int, list[float]]()
    del settings["optimizer"]
    model = small_gpt()
    optimizer = torch.optim.AdamW(decay_groups(model), lr=2e-3)
    cyclic = CyclicLR(optimizer, 1e-3, 3e-3, 2, cycle_momentum=False)
    first = LinearLR(optimizer, 0.5, total_iters=2)
    scheduler = SequentialLR(optimizer, [first, cyclic], [2])
    with jobs.job(settings, model=model, optimizer=optimizer, lr_scheduler=scheduler) as made:
        registered = CyclicLR(torch.optim.SGD([torch.zeros(1)], 1.0), 0.1, 0.3, 2)
        made.engine.register_for_checkpointing("another", registered)
        rates |= jobs.train(made, 4, {3: (4, 2)}).rates
        made.engine.save(folder)
        for _ in range(2):
            rates |= jobs.train(made, 8, {5: (4, 3 - made.engine.layout.zero_stage)}).rates
            made.engine.load(folder)
        last = jobs.train(made, 8).rates
        assert all(rates[step] == last[step] for step in last)
        return [last[step] for step in sorted(last)]
    return []


@pytest.mark.full
def test_schedulers_that_take_states_apart(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(cyclic_case, folder=str(tmp_path))
    assert found == found[:1] * 4 and len(found[0]) == 4
    assert len({rate for rate, *_ in found[0]}) == 3, "a triangle"


def epochs_case(start: jobs.Sizes, schedule: jobs.Schedule) -> Any:
    """Two and a half batches of 12 an epoch; the numbers of epochs and steps that each member saw."""
    seen: list[tuple[int, int]] = []
    record = jobs.Record()
    with jobs.job(jobs.config(start=start), data=Sequences(30)) as made:
        engine = made.engine
        for _ in engine.epochs(3):
            for batch in made.loader:
                if (engine.job_epoch, engine.global_steps) not in seen:
                    seen.append((engine.job_epoch, engine.global_steps))
                jobs.one_micro_batch(engine, batch, record)
                if engine.global_steps in schedule:
                    jobs.ask(engine, schedule[engine.global_steps])
        return seen, record, engine.global_samples
    return seen, record, None


@pytest.mark.full
def test_switch_in_the_last_step_of_an_epoch(pool: RankPool) -> None:
    """Asked for in the last step of epoch 0, it takes effect in epoch 1: there the idle members wake."""
    static = pool.run(epochs_case, start=(2, 1), schedule={})
    switched = pool.run(epochs_case, start=(2, 1), schedule={3: (4, 3), 6: (1, 0)})
    steps = [(step // 3, step) for step in range(9)]
    assert static[0][0] == switched[0][0] == steps
    assert switched[3][0] == steps[3:6], "woke in epoch 1, idle from its end on"
    losses = [jobs.global_losses([record for _, record, _ in run]) for run in (switched, static)]
    assert len(losses[0]) == 9 and jobs.furthest(*losses) <= 1e-6
    assert static[0][2] == switched[0][2] == 90


def norms_case(schedule: jobs.Schedule) -> dict[int, tuple[float | None, list[float]]]:
    """By step: the gradient norm after it, and what engine and optimizer say before the next one."""
    found: dict[int, tuple[float | None, list[float]]] = {}
    with jobs.job(jobs.config(start=(2, 1), train_micro_batch_size_per_gpu=12)) as made:
        engine = made.engine
        for number, batch in enumerate(made.loader):
            norm, held = engine.get_global_grad_norm(), getattr(made.optimizer, "_global_grad_norm", None)
            if number and norm is not None:
                sides = [norm] if held is None else [norm, held]
                assert all(isinstance(each, torch.Tensor) for each in sides)
                found[engine.global_steps] = found.get(engine.global_steps, (None, []))[0], list(map(float, sides))
            engine.backward(engine(*batch))
            engine.step()
            after = engine.get_global_grad_norm()
            found[engine.global_steps] = None if after is None else float(after), []
            if engine.global_steps == STEPS:
                return found
            if engine.global_steps in schedule:
                jobs.ask(engine, schedule[engine.global_steps])
    return found


def test_the_gradient_norm_is_of_the_last_step(pool: RankPool) -> None:
    """After a step of stage 0 there is none, as in DeepSpeed; a switch keeps that of the step before it."""
    static = pool.run(norms_case, schedule={})[0]
    for found in pool.run(norms_case, schedule={2: (4, 3), 4: (3, 0), 6: (2, 2)}):
        for step, (after, before_next) in found.items():
            wanted = static[step][0]
            if 4 < step <= 6:
                assert after is None and before_next == []
            else:
                assert after is None or after == pytest.approx(wanted, rel=1e-5)
                assert before_next == pytest.approx([wanted] * len(before_next), rel=1e-5)
    assert all(norm is not None for norm, _ in static.values())


class Numbered(Sequences):
    """Samples with their index."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), index)


def sampler_case() -> list[tuple[int, list[int]]]:
    """Epochs whose order `set_epoch` decides, with members that wake in the second one and then count from 0."""
    data, dealt = Numbered(24), list[tuple[int, list[int]]]()
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0, seed=3)
    with jobs.job(jobs.config(start=(2, 1)), data=DataLoader(data, 6, sampler=sampler)) as made:
        engine = made.engine
        for epoch in range(4):
            sampler.set_epoch(10 - epoch)
            for *batch, indices in made.loader:
                dealt.append((engine.global_steps, indices.tolist()))
                engine.backward(engine(*batch))
                engine.step()
                if engine.global_steps == 2:
                    engine.switch(data=4, at=3)
    return dealt


def test_the_order_that_set_epoch_decides(pool: RankPool) -> None:
    """As torch's sampler has it on one rank, also where members have come late."""
    found: dict[int, set[int]] = {}
    for step, indices in [each for dealt in pool.run(sampler_case) for each in dealt]:
        found.setdefault(step, set()).update(indices)
    sampler: DistributedSampler[Any] = DistributedSampler(range(24), 1, 0, seed=3)
    wanted = []
    for epoch in range(4):
        sampler.set_epoch(10 - epoch)
        wanted += [set(list(sampler)[at : at + 12]) for at in (0, 12)]
    assert [found[step] for step in range(8)] == wanted


def evaluating_case(folder: str, schedule: jobs.Schedule) -> Any:
    """After every step: the loss on a held-out set, and a checkpoint."""
    record, held_out = jobs.Record(), dict[int, tuple[float, int]]()
    with jobs.job(jobs.config(start=(2, 3))) as made:
        evaluation = made.engine.loader(Sequences(10), evaluation=True, num_workers=0, batch_size=2)

        def evaluate_and_save(job: jobs.Job) -> None:
            engine = job.engine
            engine.eval()
            total, count = 0.0, 0
            with torch.no_grad():
                for batch in evaluation:
                    total += engine(*batch).item() * evaluation.samples
                    count += evaluation.samples
            engine.train()
            held_out[engine.global_steps] = total, count
            engine.save_checkpoint(folder, tag=f"step{engine.global_steps}")

        jobs.train(made, 8, schedule, record, each=evaluate_and_save)
    return record, held_out


@pytest.mark.full
def test_loop_that_evaluates_and_saves(pool: RankPool, tmp_path: Path) -> None:
    schedule = {2: (3, 3), 4: (2, 3), 5: (4, 3), 6: (1, 2)}
    runs = [
        pool.run(evaluating_case, folder=str(tmp_path / name), schedule=given, seconds=90)
        for name, given in (("switched", schedule), ("static", {}))
    ]
    losses = [jobs.global_losses([record for record, _ in run]) for run in runs]
    assert losses[0][:2] == losses[1][:2]
    whole = []
    for run in runs:
        sums = {step: [held[step] for _, held in run if step in held] for step in range(1, 9)}
        assert all(sum(count for _, count in parts) == 10 for parts in sums.values())
        whole.append([sum(total for total, _ in parts) / 10 for parts in sums.values()])
    assert jobs.furthest(*whole) <= 1e-6
    for name in ("switched", "static"):
        assert len(list((tmp_path / name).glob("step*"))) == 8


def monitored_case(folder: str, schedule: jobs.Schedule) -> jobs.Record:
    monitor = {"enabled": True, "output_path": folder, "job_name": "run"}
    return jobs.run(jobs.config(csv_monitor=monitor, steps_per_print=1), STEPS, schedule)


@pytest.mark.full
def test_csv_monitor_writes_one_run(pool: RankPool, tmp_path: Path) -> None:
    columns = []
    for name, schedule in (("switched", SCHEDULE), ("static", {})):
        folder = tmp_path / name
        pool.run(monitored_case, folder=str(folder), schedule=schedule)
        files = {path.name: list(csv.reader(path.open())) for path in sorted(folder.rglob("*.csv"))}
        assert files
        columns.append({file: [row[0] for row in rows[1:]] for file, rows in files.items()})
        for file, rows in files.items():
            steps = [int(float(row[0])) for row in rows[1:]]
            assert len(steps) == STEPS and steps == sorted(set(steps)), f"{name} {file}"
    assert columns[0] == columns[1]


def told_case(folder: str) -> list[tuple[int, int]]:
    """A job whose switches go to its csv monitor: after which samples, and to how many ranks."""
    found = list[tuple[int, int]]()
    settings = jobs.config(csv_monitor={"enabled": True, "output_path": folder, "job_name": "run"})
    settings["dynatrain"]["report"] = {"monitor": True}
    with jobs.job(settings) as made:
        made.engine.on_switch(lambda event: found.append((12 * event.step, len(event.target.members))))
        jobs.train(made, STEPS, SCHEDULE, jobs.Record())
    return found


def test_switches_go_to_the_csv_monitor(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(told_case, folder=str(tmp_path))[0]
    rows = list(csv.reader((tmp_path / "run" / "Dynatrain_world_size.csv").open()))
    assert rows[0] == ["step", "world_size"] and [(int(at), int(float(size))) for at, size in rows[1:]] == found
    assert [size for _, size in found] == [size for size, _ in SCHEDULE.values()]


def torch_style_case(start: jobs.Sizes, style: str, schedule: jobs.Schedule) -> jobs.Record | None:
    """8 samples, so that slots weigh unequally over 3 ranks."""
    record = jobs.Record()
    with jobs.job(jobs.config(start=start, train_batch_size=8, train_micro_batch_size_per_gpu=2)) as made:
        engine = made.engine
        for inputs, targets in made.loader:
            step, samples = engine.global_steps, 0 if engine.slot_is_borrowed else len(inputs)
            loss = engine(inputs, targets)
            loss.backward() if style == "torch" else engine.backward(loss)
            engine.step()
            record.losses.setdefault(step, []).append((loss.item(), samples))
            if engine.global_steps > step and engine.global_steps in schedule:
                jobs.ask(engine, schedule[engine.global_steps])
            if engine.global_steps == 7:
                return record
    return record


@pytest.mark.parametrize("stage", [*(pytest.param(each, marks=pytest.mark.full) for each in (1, 2)), 3])
def test_backward_of_the_loss_itself(pool: RankPool, stage: int) -> None:
    schedule = {2: (3, stage), 4: (4, 1 + stage % 3)}
    runs = [
        jobs.global_losses(pool.run(torch_style_case, start=(2, stage), style=style, schedule=schedule))
        for style in ("torch", "deepspeed")
    ]
    assert len(runs[0]) == 7 and jobs.furthest(*runs) <= 1e-6


class Masked(Sequences):
    """Every sample has another number of targets that count."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = super().__getitem__(index)
        targets = targets.clone()
        targets[1 + index % LENGTH :] = -100
        return inputs, targets


def token_case(start: jobs.Sizes, micro: int, schedule: jobs.Schedule) -> jobs.Record | None:
    record = jobs.Record()
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": micro}
    with jobs.job(jobs.config(start=start, **sizes), data=Masked()) as made:
        engine = made.engine
        for inputs, targets in made.loader:
            step, tokens = engine.global_steps, int((targets >= 0).sum())
            loss = engine(inputs, targets)
            borrowed = engine.slot_is_borrowed
            engine.backward(loss, tokens=tokens)
            engine.step()
            record.losses.setdefault(step, []).append((loss.item(), 0 if borrowed else tokens))
            if engine.global_steps > step and engine.global_steps in schedule:
                jobs.ask(engine, schedule[engine.global_steps])
            if engine.global_steps == 8:
                return record
    return record


@pytest.mark.parametrize(
    ("start", "schedule"),
    [
        ((2, 0), {}),
        pytest.param((3, 1), {}, marks=pytest.mark.full),
        pytest.param((4, 2), {}, marks=pytest.mark.full),
        pytest.param((3, 3), {}, marks=pytest.mark.full),
        ((2, 1), {2: (3, 3), 4: (4, 0), 6: (1, 2)}),
    ],
)
def test_gradients_by_token_counts(pool: RankPool, start: jobs.Sizes, schedule: jobs.Schedule) -> None:
    """Against all 8 samples in one micro-batch, where the mean over tokens is the loss itself."""
    whole = jobs.global_losses(pool.once(token_case, start=(1, 0), micro=8, schedule={}))
    parts = jobs.global_losses(pool.run(token_case, start=start, micro=2, schedule=schedule))
    assert len(parts) == 8 and jobs.furthest(parts, whole) <= 1e-6
