"""DeepSpeed's pipeline engine with the changes of `host_engine`; its module can also become another stage.

A column is a pipeline replica: the ranks with one data index, one of each stage. DeepSpeed runs one schedule in each
column. Columns communicate only in the last instructions of their schedules, which add up gradients and losses, so each
column may have a schedule of its own length. Only the divisor of these sums must change: it is the mean number of
micro-batches per column, whereas `gradient_accumulation_steps()` is the number in the longest column.

Layers before the first trained one have no backward pass, and no gradient is sent to them. DeepSpeed's own engine
expects a gradient on every stage: its inputs require a gradient, and its outputs wait for one.

Which layers are frozen follows from the parameters that are registered as trained, and every member knows these for the
whole model. Two neighbouring stages thus agree without a message whether the second sends the first a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, RecvGrad, SendGrad
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import RepeatingLoader as RepeatingLoader
from torch import nn

from ds_dynatrain.adapters.deepspeed.host import Host
from ds_dynatrain.adapters.deepspeed.host_engine import COMPILE_BACKEND, NOTHING, HostEngine
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.model.module_state import note
from ds_dynatrain.adapters.model.pipeline_layers import layer_of
from ds_dynatrain.adapters.model.stage_module import PipelineShaper, StageGrid, place, take_stage
from ds_dynatrain.adapters.versions.compiled import compile_layers
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.adapters.zero.deepspeed_config import Settings
from ds_dynatrain.adapters.zero.stages import count_empty_experts, count_empty_groups, stage_without_gradients
from ds_dynatrain.adapters.zero.state import Buffers, Scalars
from ds_dynatrain.data import EvaluationLoader
from ds_dynatrain.space import Columns, Layout


def frozen_layers(prefixes: Sequence[str], trained: Collection[str]) -> int:
    """Return the number of layers before the first trained one, or the number of all layers if none is trained.

    prefixes: the prefix of each layer's parameter names; see `PipelineTemplate.prefixes`.
    trained: names of the parameters that require a gradient.

    A tied layer counts as trained wherever it occurs.
    """
    layers = set(map(layer_of, trained))
    return next((number for number, prefix in enumerate(prefixes) if prefix in layers), len(prefixes))


def needless(start: int, stop: int, frozen: int) -> tuple[type, ...]:
    """Return the instructions that a stage skips because the model's first `frozen` layers are not trained.

    start: number of the stage's first layer.
    stop: number of the layer after the stage's last one.

    Two neighbouring stages agree: one skips exactly those receives whose sends the other skips.
    """
    ends_within = (BackwardPass, RecvGrad) if stop <= frozen else ()
    return (*ends_within, SendGrad) if start <= frozen else ends_within


def _skip(engine: Any, **_: Any) -> None:
    """Do nothing. Replaces an instruction of a schedule that is unnecessary."""


@contextmanager
def _checkpointed_behind(module: PipelineModule, frozen: int) -> Iterator[None]:
    """Context manager in which the activations of a stage's first `frozen` layers are not recomputed.

    These layers get no gradient. A reentrant checkpoint does not look at parameters: it has a backward pass only if one
    of its inputs requires a gradient. The first checkpoint after the frozen layers is therefore given inputs that do.
    """
    interval, checkpoint = module.activation_checkpoint_interval, module.activation_checkpoint_func

    def seeing_inputs(run: Callable[..., Any], *inputs: Any) -> Any:
        if torch.is_grad_enabled() and not any(each.requires_grad for each in _tensors(inputs)):
            inputs = tuple(map(_requiring, inputs))
        return checkpoint(run, *inputs)

    changes: dict[str, Any] = {}
    if interval > 0:
        segments = enumerate(module.is_checkpointable_results)
        kept = [is_one and min((at + 1) * interval, len(module.forward_funcs)) > frozen for at, is_one in segments]
        changes["is_checkpointable_results"] = kept
        if checkpoint is not non_reentrant_checkpoint:
            changes["activation_checkpoint_func"] = seeing_inputs
    with replaced(module, **changes):
        yield


def _requiring(value: Any) -> Any:
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_real else value


def _tensors(given: Any) -> list[torch.Tensor]:
    """Return the tensors in `given`, which is a tensor, a tuple or some other value."""
    parts = given if isinstance(given, tuple) else (given,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


_BUFFERS = ("inputs", "labels", "outputs", "output_tensors")


@dataclass(eq=False)
class StageHost(Host):
    """Host of a pipeline engine.

    compiled_with: arguments of the engine's `compile`; None before that call.
    """

    shaper: PipelineShaper
    compiled_with: dict[str, Any] | None = None

    @property
    def compiled_modules(self) -> list[str]:
        """Names of the compiled modules, the same on all members: one entry for all compiled layers, or none.

        Layers are not listed one by one, because stages have different layers.
        """
        return [] if self.compiled_with is None else ["every layer"]

    def _enter_world(self, world: World, layout: Layout, config: Settings) -> None:
        super()._enter_world(world, layout, config)
        grid = StageGrid(world, self.engine.global_rank)
        place(self.module, self.shaper.template, layout, grid)
        if self.compiled_with is not None:
            compile_layers(self.module, self.compiled_with)
        self.engine._enter_stage(grid)

    def put_in_place(self) -> None:
        """Make DeepSpeed's messages between stages use this engine's grid of ranks."""
        p2p._grid = self.engine.grid

    def leave_shape(self) -> None:
        """Release the groups of the world and all activations."""
        super().leave_shape()
        self.engine.grid = self.engine.mpu = p2p._grid = None
        module: Any = self.module
        module._grid, module.tied_comms = None, {}
        self.engine._forget_activations()

    def break_off(self) -> None:
        """Clean up with `Host.break_off`, and no longer force a micro-batch to end an accumulation window."""
        super().break_off()
        self.engine._force_grad_boundary = False

    def attach(self, layout: Layout, world: World, config: Settings, buffers: Buffers, scalars: Scalars) -> None:
        """Build a ZeRO optimizer with `Host.attach`, and assign micro-batches to the layout's pipeline replicas."""
        super().attach(layout, world, config, buffers, scalars)
        self.engine.micro_batch_size = self.engine.train_micro_batch_size_per_gpu()
        self.engine._enter_columns(self.layout)
        self.engine.batch_timer.batch_size = self.engine.train_batch_size()
        self.engine.using_bf16_optimizer = type(self.optimizer) is BF16_Optimizer

    def trained(self) -> dict[str, nn.Parameter]:
        """Return all parameters registered as trained, by logical name. Those of other stages have no elements."""
        model = self.model_map
        found = zip(model.tensors, model.parameters, model.requires_grad, strict=True)
        return {tensor.name: held for tensor, held, flag in found if flag}

    @property
    def forward_passes(self) -> int | None:
        """Number of micro-batches that this stage has run, with which layers seed their random numbers under
        `seed_layers`.
        """
        return int(self.engine.module.micro_offset)

    @forward_passes.setter
    def forward_passes(self, count: int | None) -> None:
        self.engine.module.micro_offset = count

    @property
    def reads_data(self) -> bool:
        """Whether this rank's stage reads samples. The first stage reads inputs, and the last one reads targets."""
        return bool(self.engine.is_first_stage() or self.engine.is_last_stage())


class PipelineHostEngine(HostEngine, PipelineEngine):  # type: ignore[misc]
    """A pipeline engine whose stage can change.

    Methods of `HostEngine` take precedence over those of DeepSpeed's classes.
    """

    _HOST: ClassVar[type[Host]] = StageHost
    _host: StageHost
    grid: StageGrid
    dp_group_loss: torch.Tensor
    _columns: Columns
    _divisor: float
    """Number by which a pipeline replica divides the sum of its losses."""
    _frozen = 0
    """Number of layers before the model's first trained layer, in the current batch."""
    _known_loss: torch.Tensor | None = None

    def __init__(self, *, groups: World, model: PipelineModule, **arguments: Any) -> None:
        """Build the engine.

        groups: the installed world in which the engine starts; it may have no peers.
        """
        grid = StageGrid(groups, groups.rank or 0)
        take_stage(model, grid)
        parsed = arguments["config_class"]
        product = parsed.train_micro_batch_size_per_gpu * parsed.gradient_accumulation_steps * groups.layout.data
        with replaced(parsed, train_batch_size=product):  # columns may differ, and DeepSpeed checks this product
            super().__init__(model=model, mpu=grid, **arguments)
        self._enter_columns(groups.layout)
        self.batch_timer.batch_size = self.tput_timer.batch_size = self.train_batch_size()
        if groups.layout.pipe == 1:  # otherwise the module still has the layers of all stages
            place(model, self._host.shaper.template, groups.layout, grid)

    def compile(
        self,
        backend: Any = COMPILE_BACKEND,
        compile_kwargs: Mapping[str, Any] = NOTHING,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile layer by layer the way DeepSpeed does. Layers that later switches make are compiled too."""
        super().compile(backend, compile_kwargs, schedule, compiled_autograd_enabled)
        self._host.compiled_with = {**compile_kwargs, "backend": backend}

    def _enter_columns(self, layout: Layout) -> None:
        """Set how many micro-batches each pipeline replica runs under a layout.

        The configuration and the grid of ranks must already be those of the layout.
        """
        sizes = int(self.train_batch_size()), int(self.train_micro_batch_size_per_gpu())
        self._columns = Columns.of(*sizes, layout.data, layout.shares)
        self._divisor = self._columns.mean
        self.micro_batches = self._columns.counts[self.grid.get_data_parallel_id()]

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Train a batch the way DeepSpeed does.

        For `seed_layers`, each pipeline replica counts as many passes as the replica with the most micro-batches has.
        """
        passes = self.module.micro_offset
        loss: torch.Tensor = super().train_batch(data_iter)
        self.module.micro_offset = passes + self._columns.longest
        return loss

    def eval_batch(
        self,
        data_iter: Any,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate a batch the way DeepSpeed does, on the working members. Returns the mean over all micro-batches.

        data_iter: an iterator or an evaluation loader.

        num_micro_batches: number of micro-batches that each pipeline reads. By default each pipeline reads as many as
        it trains of a global batch, and pipelines may then read different numbers.
        """
        given = iter(data_iter) if isinstance(data_iter, EvaluationLoader) else data_iter
        if num_micro_batches is None:
            longest, divisor = self._columns.longest, self._columns.mean
        else:
            longest, divisor = num_micro_batches, float(num_micro_batches)
        passes = self.module.micro_offset
        own = super().set_dataiterator  # DeepSpeed's own keeps the training loader
        with replaced(self, _divisor=divisor, set_dataiterator=own):
            found = super().eval_batch(given, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches)
        self.module.micro_offset = passes + longest
        return found

    def _scale_loss_by_gas(self, prescaled_loss: Any, eval_micro_batches: int | None = None) -> Any:
        return super()._scale_loss_by_gas(prescaled_loss, eval_micro_batches=self._divisor)

    def _frozen_layers(self) -> int:
        """Return the number of frozen layers, computed from the registered parameters by `frozen_layers`.

        The parameters' current `requires_grad` flags are ignored, so that all stages agree.
        """
        return frozen_layers(self._host.shaper.template.prefixes(), self._host.trained())

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        """Run DeepSpeed's schedule without the instructions that frozen layers make unnecessary."""
        self._frozen = self._frozen_layers()
        without = needless(self.module._local_start, self.module._local_stop, self._frozen)
        with replaced(self, _INSTRUCTION_MAP={**self._INSTRUCTION_MAP, **dict.fromkeys(without, _skip)}):
            super()._exec_schedule(pipe_schedule)

    def _exec_forward_pass(self, buffer_id: int) -> None:
        """Run DeepSpeed's forward pass. Inputs up to those of the first trained layer require no gradient."""
        note(self.module)
        held = self._frozen - self.module._local_start
        if not self._frozen or held < 0:
            super()._exec_forward_pass(buffer_id)
            return
        for tensor in _tensors(self.pipe_buffers["inputs"][buffer_id]):
            tensor.requires_grad_(False)
        with _checkpointed_behind(self.module, held):
            super()._exec_forward_pass(buffer_id)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        if self._columns.is_even or not self.is_last_stage():
            super()._exec_backward_pass(buffer_id)
        else:
            DeepSpeedEngine.backward(self, self.loss / self._divisor, scale_wrt_gas=False)

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        ForwardPass: _exec_forward_pass,
        BackwardPass: _exec_backward_pass,
    }

    def _enter_stage(self, grid: StageGrid) -> None:
        """Make this engine the engine of a stage in the world of `grid`. Unlike DeepSpeed's constructor, this sends no
        message.
        """
        self.grid = self.mpu = grid
        self.num_stages, self.stage_id = grid.pipe_parallel_size, grid.stage_id
        self.prev_stage, self.next_stage = grid.stage_id - 1, grid.stage_id + 1
        self.is_pipe_parallel, self.is_data_parallel = grid.pipe_parallel_size > 1, grid.data_parallel_size > 1
        self.checkpoint_mp_rank = grid.stage_id
        p2p._grid = grid
        self.data_iterator = self.training_dataloader = None
        self._forget_activations()

    def _forget_activations(self) -> None:
        """Drop the buffers of the previous shape and the losses of the previous world."""
        self.num_pipe_buffers = 0
        self.pipe_buffers: dict[str, list[Any]] = {name: [] for name in _BUFFERS}
        self.reset_activation_shape()
        self.first_gradient_send = True
        self.outputs = self.fwd_outputs = None
        self.total_loss = self.total_additional_losses = self.agg_additional_losses = None
        self.loss, self.agg_loss, self.dp_group_loss = (torch.tensor(0.0, device=self.device) for _ in range(3))

    def _allocate_or_extend_buffers(self, idx: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Provide a buffer the way DeepSpeed does, but never reuse one of another element type.

        A stage under autocast may receive activations in fp32 and send them on in bf16. DeepSpeed would then receive
        bf16 gradients into the memory of fp32 ones, and read two of them as one number.
        """
        held = self._grad_layer_buf
        if idx < len(held) and held[idx].dtype != dtype:
            held[idx] = torch.empty(0, dtype=dtype, device=self.device)
        made: torch.Tensor = super()._allocate_or_extend_buffers(idx, shape, dtype)
        return made

    @torch.no_grad()
    def _share_loss(self) -> None:
        """Give the loss of a batch to all ranks before the step, so that no rank lacks it if a member dies later."""
        self._known_loss = self._total_loss()

    def _aggregate_total_loss(self) -> torch.Tensor:
        """Return DeepSpeed's total loss, or the loss that was shared before the step if there is one."""
        known, self._known_loss = self._known_loss, None
        return self._total_loss() if known is None else known

    def _total_loss(self) -> torch.Tensor:
        """Return the mean loss over all micro-batches, even if pipelines have different numbers of them.

        A collective of all stages.
        """
        found: torch.Tensor = super()._aggregate_total_loss()
        if not self._columns.is_even:
            self.dp_group_loss = self.dp_group_loss * (self._divisor / self.micro_batches)
        return found

    def _loss_of_step(self) -> torch.Tensor:
        """Return the loss of the last step, even if this rank's call was interrupted and only other ranks finished the
        step.
        """
        known, self._known_loss = self._known_loss, None
        self.agg_train_loss: torch.Tensor = self.agg_train_loss if known is None else known
        return self.agg_train_loss

    def clip_fp32_gradients(self) -> None:
        """Clip gradients the way DeepSpeed does.

        A stage without gradients adds 0 to the norm, for which other stages wait.
        """
        if any(held.grad is not None for held in self.module.parameters()) or self._host.layout.expert > 1:
            super().clip_fp32_gradients()
            return
        stepped = [held for group in self.basic_optimizer.param_groups for held in group["params"]]
        clip_grad_norm_(stepped, self.gradient_clipping(), mpu=self.mpu)  # `stepped`: placeholders of empty groups

    def _take_model_step(self, *arguments: Any) -> None:
        if self.using_bf16_optimizer:
            count_empty_experts(self.optimizer, self._host.model_map)
            with stage_without_gradients(self.optimizer):
                super()._take_model_step(*arguments)
            return
        if self.optimizer is self.basic_optimizer:
            count_empty_groups(self.basic_optimizer, self._host.model_map)
        super()._take_model_step(*arguments)
