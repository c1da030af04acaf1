"""DeepSpeed's pipeline engine with the same openings: what its constructor does for a number of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.schedule import ForwardPass
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import RepeatingLoader as RepeatingLoader
from torch import nn

from ds_dynatrain.adapters.attributes import note
from ds_dynatrain.adapters.columns import ColumnEngine
from ds_dynatrain.adapters.compiled import compile_layers
from ds_dynatrain.adapters.frozen_prefix import FrozenPrefixEngine, frozen_layers
from ds_dynatrain.adapters.grid import StageGrid
from ds_dynatrain.adapters.host import Host
from ds_dynatrain.adapters.host_engine import COMPILE_BACKEND, NOTHING, HostEngine
from ds_dynatrain.adapters.replaced import replaced
from ds_dynatrain.adapters.stage0 import count_empty_groups
from ds_dynatrain.adapters.stage_module import PipelineShaper, leave, place, take_stage
from ds_dynatrain.adapters.stages import count_empty_experts, stage_without_gradients
from ds_dynatrain.adapters.world import World
from ds_dynatrain.space import Layout, LogicalTensor

_BUFFERS = ("inputs", "labels", "outputs", "output_tensors")


@dataclass(eq=False)
class StageHost(Host):
    """That of a pipeline engine. compiled_with: what `compile` was told, once it was called."""

    shaper: PipelineShaper
    compiled_with: dict[str, Any] | None = None

    @property
    def compiled_modules(self) -> list[str]:
        """All layers or none: stages have different ones."""
        return [] if self.compiled_with is None else ["every layer"]

    def _enter_world(self, world: World, layout: Layout, config: tuple[dict[str, Any], Any]) -> None:
        super()._enter_world(world, layout, config)
        grid = StageGrid(world, self.engine.global_rank)
        place(self.module, self.shaper.template, layout, grid)
        if self.compiled_with is not None:
            compile_layers(self.module, self.compiled_with)
        self.engine._enter_stage(grid)

    def put_in_place(self) -> None:
        """Let DeepSpeed's messages between stages be those of this engine."""
        p2p._grid = self.engine.grid

    def leave_shape(self) -> None:
        """Hold no group of a world, and no activation."""
        super().leave_shape()
        self.engine.grid = self.engine.mpu = p2p._grid = None
        leave(self.module)
        self.engine._forget_activations()

    def break_off(self) -> None:
        """As with any engine; no micro-batch ends a window any more."""
        super().break_off()
        self.engine._force_grad_boundary = False

    def _after_attach(self) -> None:
        super()._after_attach()
        self.engine.micro_batch_size = self.engine.train_micro_batch_size_per_gpu()
        self.engine._enter_columns(self.layout)
        self.engine.batch_timer.batch_size = self.engine.train_batch_size()
        self.engine.using_bf16_optimizer = type(self.optimizer) is BF16_Optimizer

    def stage_layers(self, layout: Layout) -> tuple[tuple[str, ...], ...]:
        """Without those that are functions; a tied one is on each of its stages."""
        return self.shaper.template.layers_by_stage(layout)

    @property
    def frozen_layers(self) -> int:
        """How many layers of the whole model there are before the first one that is registered as trained."""
        return frozen_layers(self.shaper.template.prefixes(), {tensor.name for tensor, _ in self.trained()})

    def trained(self) -> list[tuple[LogicalTensor, nn.Parameter]]:
        """Return what is registered as trained, on all stages; a parameter of another stage is empty here."""
        model = self.model_map
        found = zip(model.tensors, model.parameters, model.requires_grad, strict=True)
        return [(tensor, held) for tensor, held, flag in found if flag]

    @property
    def forward_passes(self) -> int | None:
        """Micro-batches that this stage has run: with `seed_layers`, layers draw by it."""
        return int(self.engine.module.micro_offset)

    @forward_passes.setter
    def forward_passes(self, count: int | None) -> None:
        self.engine.module.micro_offset = count

    @property
    def reads_data(self) -> bool:
        """Whether this rank's stage reads samples: the first one inputs, the last one targets."""
        return bool(self.engine.is_first_stage() or self.engine.is_last_stage())


class PipelineHostEngine(HostEngine, FrozenPrefixEngine, ColumnEngine):
    """A pipeline engine whose stage changes. `HostEngine`'s openings come before DeepSpeed's two classes."""

    _HOST: ClassVar[type[Host]] = StageHost
    _host: StageHost
    grid: StageGrid
    _known_loss: torch.Tensor | None = None

    def __init__(self, *, groups: World, model: PipelineModule, **arguments: Any) -> None:
        """groups: of the world to start in, which may be a stand-in; it is installed."""
        grid = StageGrid(groups, groups.rank or 0)
        take_stage(model, grid)
        parsed = arguments["config_class"]
        product = parsed.train_micro_batch_size_per_gpu * parsed.gradient_accumulation_steps * groups.layout.data
        with replaced(parsed, "train_batch_size", product):  # columns may differ, and DeepSpeed insists
            super().__init__(model=model, mpu=grid, **arguments)
        self._enter_columns(groups.layout)
        self.batch_timer.batch_size = self.tput_timer.batch_size = self.train_batch_size()
        if groups.layout.pipe == 1:  # else the module has the layers of all stages still
            place(model, self._host.shaper.template, groups.layout, grid)

    def _configure_expert_parallel(self, model: nn.Module, collect_sources: bool | None = None) -> Any:
        """DeepSpeed's, but that the shaper has AutoEP's layers in the module already."""
        if self._host.shaper.autoep:
            return self._host.shaper.autoep.take_replaced()
        return super()._configure_expert_parallel(model, collect_sources)

    def compile(
        self,
        backend: Any = COMPILE_BACKEND,
        compile_kwargs: Mapping[str, Any] = NOTHING,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """DeepSpeed's, which compiles layer by layer; layers that a switch makes anew are compiled, too."""
        super().compile(backend, compile_kwargs, schedule, compiled_autograd_enabled)
        self._host.compiled_with = {**compile_kwargs, "backend": backend}

    def _exec_forward_pass(self, buffer_id: int) -> None:
        note(self.module)
        super()._exec_forward_pass(buffer_id)

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        **ColumnEngine._INSTRUCTION_MAP,
        ForwardPass: _exec_forward_pass,
    }

    def _frozen_layers(self) -> int:
        """By what is registered, not by what a parameter says now: so all stages say the same."""
        return self._host.frozen_layers

    def _enter_stage(self, grid: StageGrid) -> None:
        """Be the engine of a stage in a world.

        Nothing is sent: DeepSpeed's constructor adds parameters up for a message, and sends a first number around.
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
        """No buffer of the former shape, no loss of the former world."""
        self.num_pipe_buffers = 0
        self.pipe_buffers: dict[str, list[Any]] = {name: [] for name in _BUFFERS}
        self.reset_activation_shape()
        self.first_gradient_send = True
        self.outputs = self.fwd_outputs = None
        self.total_loss = self.total_additional_losses = self.agg_additional_losses = None
        self.loss, self.agg_loss, self.dp_group_loss = (torch.tensor(0.0, device=self.device) for _ in range(3))

    def _allocate_or_extend_buffers(self, idx: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """DeepSpeed's, but that a buffer of another type is not taken again.

        A stage under autocast may receive activations in fp32 and send them on in bf16. DeepSpeed then receives their
        gradients, which are in bf16, into the memory of the fp32 ones, and reads two of them as one number.
        """
        held = self._grad_layer_buf
        if idx < len(held) and held[idx].dtype != dtype:
            held[idx] = torch.empty(0, dtype=dtype, device=self.device)
        made: torch.Tensor = super()._allocate_or_extend_buffers(idx, shape, dtype)
        return made

    @torch.no_grad()
    def _share_loss(self) -> None:
        """Let all know the loss of a batch before its step is made: who dies later takes it from nobody."""
        self._known_loss = self._total_loss()

    def _aggregate_total_loss(self) -> torch.Tensor:
        """DeepSpeed's, which was shared before the step."""
        known, self._known_loss = self._known_loss, None
        return self._total_loss() if known is None else known

    def _total_loss(self) -> torch.Tensor:
        """Return DeepSpeed's mean over the pipelines, which is a collective of all stages."""
        found: torch.Tensor = super()._aggregate_total_loss()
        return found

    def _loss_of_step(self) -> torch.Tensor:
        """That of the step which was made last, also by others for this rank, whose own call was broken off in it."""
        known, self._known_loss = self._known_loss, None
        self.agg_train_loss: torch.Tensor = self.agg_train_loss if known is None else known
        return self.agg_train_loss

    def clip_fp32_gradients(self) -> None:
        """DeepSpeed's; a stage without a gradient adds 0 to the norm, for which the others wait."""
        if any(held.grad is not None for held in self.module.parameters()) or self._host.layout.expert > 1:
            super().clip_fp32_gradients()
            return
        stepped = [held for group in self.basic_optimizer.param_groups for held in group["params"]]
        clip_grad_norm_(stepped, self.gradient_clipping(), mpu=self.mpu)  # of empty groups, see `stage0`

    def _take_model_step(self, *arguments: Any) -> None:
        if self.using_bf16_optimizer:
            count_empty_experts(self.optimizer, self._host.model_map)
            with stage_without_gradients(self.optimizer):
                super()._take_model_step(*arguments)
            return
        if self.optimizer is self.basic_optimizer:
            count_empty_groups(self.basic_optimizer, self._host.model_map)
        super()._take_model_step(*arguments)
