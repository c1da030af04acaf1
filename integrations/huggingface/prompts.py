"""TRL trainers that answer prompts (GRPO, RLOO), over a world that changes.

A global batch of completions is one generation batch. Its prompts follow from the epoch and the step alone, so every
rank knows the prompts of all ranks: rank r of W answers rows [r n, (r + 1) n) with n = train_batch_size / W. The
rewards, which TRL gathers in the order of ranks, thus lie prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from torch.utils.data import DataLoader

from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.elastic.environment import worker_place
from ds_dynatrain.errors import ConfigError, SwitchRefused, UnsupportedError
from ds_dynatrain.extension import Extension
from ds_dynatrain.integrations.huggingface.settings import arguments_in
from ds_dynatrain.integrations.shared.batches import GlobalBatches, Window

if TYPE_CHECKING:
    from typing import Any as Below
else:
    Below = object
"""The trainer's class that the mix-in extends."""

DIVIDED_LOSSES = ("cispo", "dapo", "vespo")
"""Losses that TRL divides by the tokens of all ranks. TRL takes the mean of other losses over each micro-batch."""
PROMPTED = "_generate_and_score_completions"
"""Method whose presence shows that a trainer generates completions."""
Row = Mapping[str, Any]


class EqualShares(Extension):
    """Extension that refuses layouts in which ranks would answer different numbers of prompts.

    samples: the completions of a global batch.
    evaluated: the completions that a rank makes at a time for evaluation; 0 if there is no evaluation.
    copies: the completions of one prompt in evaluation.
    """

    def __init__(self, samples: int, evaluated: int, copies: int) -> None:
        self._samples, self._evaluated, self._copies = samples, evaluated, copies

    def check_layout(self, layout: Any, batch: Any, has_stages: bool) -> None:
        """Raise SwitchRefused unless rewards can be gathered and grouped by prompt."""
        fits = [size for size in range(1, self._samples + 1) if self._samples % size == 0]
        fits = [size for size in fits if size * self._evaluated % self._copies == 0]
        if layout.data not in fits:
            evaluated = f", and {self._evaluated} of evaluation with {self._copies} to a prompt" * bool(self._evaluated)
            raise SwitchRefused(
                f"{layout}: data={layout.data} does not divide train_batch_size {self._samples}{evaluated}: rewards "
                f"are gathered from equal numbers of completions; take data= one of {', '.join(map(str, fits))}"
            )


class Places(torch.utils.data.Dataset[int]):
    """A data set of the positions of an epoch's completions. Each position is its own sample."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> int:
        return place


class PromptMixin(Below):
    """Mix-in between `ElasticMixin` and a TRL trainer that generates completions and has rewards for them."""

    _orders: dict[int, list[int]]
    """Rows of the data set in the order of an epoch's completions, by epoch."""
    _completions: tuple[tuple[int, int], dict[str, Any] | None] = ((-1, 0), None)
    """(number of the generation batch, generation of the world) and this rank's completions."""
    _due: Iterator[dict[str, Any]]
    """Completions of the open global batch's micro-batches that have not been trained yet."""
    _measured: dict[str, int]
    """Number of values of each metric before the open global batch."""

    def begin(self, given: Sequence[Any]) -> None:
        """Check the arguments, and set those that the configuration determines. Runs before the trainer's constructor.

        given: the constructor's arguments.
        """
        args: Any = arguments_in(given)
        refuse_generations(args)
        super().begin(given)
        self._orders, size = {}, self._settings.global_batch
        if size % args.num_generations:
            raise ConfigError(
                f"train_batch_size {size} is no multiple of num_generations {args.num_generations}: a global batch "
                "has all completions of its prompts; change one of them"
            )
        args.steps_per_generation, args.generation_batch_size = 1, size

    def _prepare_for_training(self, *arguments: Any, **named: Any) -> Any:
        """Make an engine that refuses worlds with unequal shares."""
        args, self._completions = self.args, PromptMixin._completions
        evaluated = args.per_device_eval_batch_size if args.do_eval and args.eval_strategy != "no" else 0
        copies = args.num_generations_eval or args.num_generations
        shares = EqualShares(self._settings.global_batch, evaluated, copies)
        make = partial(deepspeed.initialize, extensions=[shares])
        with replaced(deepspeed, initialize=make):
            made: tuple[Any, Any] = super()._prepare_for_training(*arguments, **named)
        return made

    def finish(self) -> None:
        """Check the data set. Called after the trainer's constructor."""
        super().finish()
        refuse_images(self.train_dataset[0])

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> GlobalBatches:
        """Return a loader of global batches of positions."""
        loader = DataLoader(Places(len(self._order(0))), batch_size=self._train_batch_size, collate_fn=list)
        self.global_batches = GlobalBatches(loader, self._settings.global_batch, "trainer")
        return self.global_batches

    def _order(self, epoch: int) -> list[int]:
        """Return the data set's rows in the order of an epoch's completions, as given by TRL's sampler."""
        if epoch not in self._orders:
            sampler: Any = self._get_train_sampler(self.train_dataset)
            for _ in range(epoch + 1):  # TRL's sampler draws the next epoch each time
                self._orders = {epoch: list(sampler)}
        return self._orders[epoch]

    def _prompts(self, window: Window) -> list[Row]:
        """Return the data set's rows that this rank answers in a global batch."""
        size, mine = self._settings.global_batch, sum(one.samples for one in window)
        epoch, step = divmod(self.state.global_step, len(self.global_batches))
        first = step * size + self.accelerator.process_index * mine
        return [self.train_dataset[row] for row in self._order(epoch)[first : first + mine]]

    # ---- a global batch ----------------------------------------------------------------------------------------------

    def get_batch_samples(self, *arguments: Any) -> tuple[list[Window], None]:
        """Return one global batch, as one item. TRL divides its losses by itself."""
        windows, _ = super().get_batch_samples(*arguments)
        self._is_by_tokens = getattr(self, "loss_type", "") in DIVIDED_LOSSES
        return windows, None

    def training_step(self, model: Any, inputs: Window, num_items_in_batch: Any = None) -> torch.Tensor:
        """Generate and score this rank's completions if that is due, and train each of their micro-batches."""
        self._measured = {name: len(values) for name, values in self._metrics["train"].items()}
        number = self.state.global_step // self.num_iterations, self.engine.generation
        known, held = self._completions
        if known != number:
            self.model.train()
            self._last_loaded_step = -1  # every rank brings the weights to vLLM, or none
            held = self._answers(inputs)
        self._completions = (-1, 0) if held is None else number, held
        self._due = parts(held, [one.samples for one in inputs])
        with replaced(self.args, steps_per_generation=len(inputs)):  # a loss reads it as the number of micro-batches
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def _answers(self, window: Window) -> dict[str, Any] | None:
        """Return this rank's completions with their advantages; None if the world is lost meanwhile."""
        generate = self._generate_and_score_completions
        found: dict[str, Any] | None = self._together(
            "completions", lambda: generate(self._prompts(window)), lambda: None
        )
        return found

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        """Return the completions of the next micro-batch, or those of an evaluation batch."""
        found: dict[str, Any] = next(self._due) if self.model.training else super()._prepare_inputs(inputs)
        return found

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> torch.Tensor:
        """Compute TRL's loss, whose metrics are collectives; 0 for a global batch that is discarded."""
        compute = partial(super().compute_loss, model, inputs, *arguments, **named)
        nothing = partial(torch.zeros, (), device=self.args.device, requires_grad=True)
        found: torch.Tensor = self._together("the loss", compute, nothing) if model.training else compute()
        return found

    def end_window(self) -> None:
        """Forget the metrics of a discarded global batch. Called after the step."""
        super().end_window()
        for name, values in self._metrics["train"].items() if self.engine.is_discarded else ():
            del values[self._measured.get(name, 0) :]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the way TRL does. Metrics of a step that is repeated after a death are left out of the next row."""
        super().log(logs, start_time)
        self._metrics["train" if self.model.training else "eval"].clear()

    def _together(self, name: str, call: Any, alone: Any) -> Any:
        """Run collectives of the working ranks. Returns the result of `alone` if the world is lost during the call."""
        return self.engine._parts.together(name, call, alone)


def parts(held: dict[str, Any] | None, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the completions of each micro-batch in turn; {} for each if there are no completions."""
    begin = 0
    for size in sizes:
        yield {} if held is None else {name: _rows(value, begin, begin + size) for name, value in held.items()}
        begin += size


def _rows(value: Any, begin: int, end: int) -> Any:
    is_row_wise = isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)
    return value[begin:end] if is_row_wise else value


def refuse_generations(args: Any) -> None:
    """Raise UnsupportedError, with a way out, for settings that cannot follow the world."""
    if args.steps_per_generation != args.gradient_accumulation_steps:
        raise UnsupportedError(
            f"steps_per_generation={args.steps_per_generation} beside gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}: here a generation batch is one global batch in every world; leave "
            "steps_per_generation and generation_batch_size out, and take num_iterations to train completions again"
        )
    if getattr(args, "use_adaptive_entropy", False):
        raise UnsupportedError(
            "use_adaptive_entropy: each rank keeps its own coefficient, which a rank that joins would not have; set "
            "entropy_coef to a constant"
        )
    if args.use_vllm and worker_place() is not None:
        raise UnsupportedError(
            "use_vllm where nodes come and go: TRL connects to vLLM from the first process of the start; take "
            "rollout_func, or a launch of a fixed number of processes"
        )


def refuse_images(row: Row) -> None:
    """Raise UnsupportedError if a row of the data set has images."""
    if named := sorted({"image", "images"}.intersection(row)):
        raise UnsupportedError(
            f"prompts with {named[0]!r}: rows of pixels are not divided into micro-batches here; train on text, or "
            "with TRL's own trainer"
        )
