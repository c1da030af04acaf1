"""DeepSpeed's engine with the few openings that a live switch needs; every private method it overrides is here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.moe.utils import configure_moe_param_groups
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.data_pipeline.constants import RANDOM_LTD_GLOBAL_BATCH_SIZE, RANDOM_LTD_MICRO_BATCH_SIZE
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.torch_autocast import init_autocast_params
from deepspeed.runtime.utils import check_internal_apis_for_count_used_parameters
from torch import nn

from ds_dynatrain.adapters import scaler, sequence
from ds_dynatrain.adapters.children import Made
from ds_dynatrain.adapters.compiled import CompileWatch, compiled_in_place
from ds_dynatrain.adapters.curriculum import CurriculumOrder
from ds_dynatrain.adapters.expert_groups import all_counted, ask_for_present_groups, refuse_mixed_groups
from ds_dynatrain.adapters.expert_groups import clip as clip_with_experts
from ds_dynatrain.adapters.experts import AutoEPShaper
from ds_dynatrain.adapters.flat import IN_HOLLOW_GROUP, fill_hollow_groups
from ds_dynatrain.adapters.fragments import correct_fragments
from ds_dynatrain.adapters.gradients import GradientWatch
from ds_dynatrain.adapters.hollow import hollow
from ds_dynatrain.adapters.memory import ElementTypes
from ds_dynatrain.adapters.model import ModelMap
from ds_dynatrain.adapters.native import forget_running_products
from ds_dynatrain.adapters.optimizers import check_optimizer, moment_types
from ds_dynatrain.adapters.rules import parts_without_zero
from ds_dynatrain.adapters.shaper import Shaper
from ds_dynatrain.adapters.shaping import WHOLE_SHAPE, Children, Shape
from ds_dynatrain.adapters.stage3 import forget_traces, reset_counters, restore_linear
from ds_dynatrain.adapters.stages import adapter_of
from ds_dynatrain.adapters.state import Buffers, Found, Scalars, StageAdapter
from ds_dynatrain.adapters.tokens import divided_by_tokens
from ds_dynatrain.adapters.versions import refuse_groups, refuse_optimizer, settle_flat_groups
from ds_dynatrain.adapters.windows import GatherWatch
from ds_dynatrain.adapters.worlds import World
from ds_dynatrain.space import Layout, LogicalTensor
from ds_dynatrain.support import practice


@dataclass(frozen=True, eq=False)
class Replaced:
    """What a reshape has replaced: the shape, the children that had it, and the parameters that the engine spoke of."""

    shape: Shape
    children: Children
    model: ModelMap
    names: dict[nn.Parameter, str]


class HostEngine(DeepSpeedEngine):  # type: ignore[misc]
    """A DeepSpeed engine whose optimizer can be taken off and put on under another layout.

    `attached` false builds it without a ZeRO optimizer: an idle member's engine, which holds parameters' names and
    shapes only. `whole` false does the same on every member: `attach_first` follows when the parameters have come in.
    """

    layout: Layout
    """The present one; from the start on."""
    model_map: ModelMap
    """The tensors in their local shapes, and the parameters of this rank."""
    shaper: Shaper
    shape: Shape
    optimizer: Any
    slot_weight: float
    slot_is_borrowed: bool
    _is_weighted: bool
    window_tokens: int | None
    without_gradient: tuple[str, ...]
    """Trainable parameters that got no gradient on this rank in the last window."""
    _gradients: GradientWatch
    _gathers: GatherWatch
    compilations: CompileWatch
    _scaling: scaler.State
    _is_own_optimizer: bool
    data_parallel_group: Any
    seq_data_parallel_group: Any

    def __init__(self, *, attached: bool, shaper: Shaper, whole: bool = True, **arguments: Any) -> None:
        self.__dict__.update(_build_attached=attached and whole, _is_whole=whole)
        self.__dict__.update(shaper=shaper, shape=WHOLE_SHAPE)
        self.__dict__.update(slot_weight=1.0, slot_is_borrowed=False, window_tokens=None, _is_weighted=False)
        self.__dict__.update(without_gradient=())
        super().__init__(**arguments)

    # ---- building ------------------------------------------------------------------------------------------------

    def _configure_expert_parallel(self, model: nn.Module, collect_sources: bool | None = None) -> Any:
        """DeepSpeed's, but that the shaper has AutoEP's layers in the model already."""
        if isinstance(self.shaper, AutoEPShaper):
            return self.shaper.take_replaced()
        return super()._configure_expert_parallel(model, collect_sources)

    def _configure_distributed_model(self, model: nn.Module) -> None:
        """DeepSpeed's; it finds the groups that layers with experts ask for."""
        ask_for_present_groups(model)
        super()._configure_distributed_model(model)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Note the user's groups before ZeRO replaces them; stop there on an idle member."""
        self._is_own_optimizer = client_optimizer is None
        if client_optimizer is None and self.has_moe_layers:
            model_parameters = configure_moe_param_groups(model_parameters)
        if client_optimizer is None:
            basic = self._configure_basic_optimizer(model_parameters)
        elif isinstance(client_optimizer, torch.optim.Optimizer):
            basic = client_optimizer
        else:
            basic = client_optimizer(model_parameters)
        basic.param_groups[:] = [group for group in basic.param_groups if group["params"]]
        refuse_mixed_groups(basic.param_groups)
        refuse_optimizer(basic)
        check_optimizer(basic, self.config, self.layout)
        self.model_map = ModelMap.of(self.module, [group["params"] for group in basic.param_groups])
        if self.model_map.dtype != self.get_data_types()[0]:
            raise practice("element types").error(f"a parameter is {self.model_map.dtype}")
        refuse_groups(self.model_map.groups)
        self._gradients = GradientWatch(self.model_map)
        self._gathers = GatherWatch(self.model_map.parameters)
        self.compilations = CompileWatch()
        self._scaling = scaler.first_state(self)
        if self._build_attached:
            reset_counters()
            super()._configure_optimizer(basic, None)
            settle_flat_groups(self.optimizer)
            correct_fragments(self.optimizer)
        else:
            self.basic_optimizer = self.optimizer = basic

    def _broadcast_model(self) -> None:
        """DeepSpeed's, unless the parameters are not there yet: then each comes in equal for all."""
        if self._is_whole:
            super()._broadcast_model()

    def attach_first(self, layout: Layout, world: World, config: tuple[dict[str, Any], Any], buffers: Buffers) -> None:
        """`attach` for the first time, with what DeepSpeed's constructors do to the state of a new optimizer."""
        for parameter in self.model_map.parameters:
            parameter.data = torch.empty(0, dtype=self.model_map.dtype, device=parameter.device)
        self.attach(layout, world, config, buffers, Scalars())
        if isinstance(self.optimizer, FP16_UnfusedOptimizer | FP16_Optimizer):
            self.optimizer.initialize_optimizer_states()  # a step on zeros: it counts, and decays the masters

    def zero_force_ds_cpu_optimizer(self) -> bool:
        """DeepSpeed asks it of optimizers that the user made; ours from the configuration comes by the same door."""
        return not self._is_own_optimizer and bool(super().zero_force_ds_cpu_optimizer())

    def curriculum_order(self, length: int) -> CurriculumOrder | None:
        """The order that the configuration's curriculum describes over a data set of that length, if there is one."""
        block = self.data_efficiency_config()
        on = block["data_sampling"]["curriculum_learning"]["enabled"]
        return CurriculumOrder(length, self.global_batch_size, block) if on else None

    @property
    def ends_window_by_hand(self) -> bool:
        """Whether the next `step` ends the window because the user says so, not because of DeepSpeed's count.

        By `set_gradient_accumulation_boundary(True)`, or without `managed_gradient_accumulation` (DeepSpeed 0.18 always
        has it).
        """
        managed = getattr(type(self), "managed_gradient_accumulation", None)
        return bool(self._is_gradient_accumulation_boundary) or not (managed is None or managed(self))

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, also where DeepSpeed's three numbers cannot say it."""
        return int(self.train_batch_size())

    def _configure_random_ltd_scheduler(self, configs: dict[str, Any]) -> Any:
        """DeepSpeed's, which counts the tokens of a global batch."""
        return super()._configure_random_ltd_scheduler(
            {**configs, RANDOM_LTD_GLOBAL_BATCH_SIZE: self.global_batch_size}
        )

    def random_ltd_config(self) -> dict[str, Any]:
        """DeepSpeed's block for random-LTD, with the sizes that its constructor adds to that of the first layout."""
        block: dict[str, Any] = super().random_ltd_config()
        block.setdefault(RANDOM_LTD_GLOBAL_BATCH_SIZE, self.train_batch_size())
        block.setdefault(RANDOM_LTD_MICRO_BATCH_SIZE, self.train_micro_batch_size_per_gpu())
        return block

    # ---- the four verbs ------------------------------------------------------------------------------------------

    @property
    def present_config(self) -> tuple[dict[str, Any], Any]:
        """DeepSpeed's configuration at present, as a dictionary and parsed."""
        return self.config, self._config

    def changed_buffers(self) -> dict[str, torch.Tensor]:
        """The module's buffers that are not as at the start, where layers go from member to member; by name."""
        return {}

    @property
    def compiled_modules(self) -> list[str]:
        """What is compiled, alike on all members."""
        return compiled_in_place(self.module)

    @property
    def forward_passes(self) -> int | None:
        """What DeepSpeed counts to seed layers by; None where it does not."""
        return None

    @forward_passes.setter
    def forward_passes(self, count: int | None) -> None:
        """Go on from a count."""

    def scaling_state(self) -> scaler.State:
        """The loss scale and what belongs to it, also what the present optimizer has no place for."""
        return scaler.read(self.optimizer, self._scaling)

    def take_scaling(self, state: scaler.State) -> None:
        """Go on with a state of `scaling_state`; what the present optimizer has no place for is kept aside."""
        self._scaling = dict(state)
        scaler.write(self.optimizer, state)

    def take_grad_norm(self, norm: float | None) -> None:
        """The norm of the last step, on a member that did not take it."""
        self._global_grad_norm = norm

    @property
    def stage_adapter(self) -> StageAdapter:
        """The adapter of the present optimizer."""
        return adapter_of(self.optimizer)

    @property
    def element_types(self) -> ElementTypes:
        """Of what type each state is: by the model and the configuration, the same in every layout."""
        weight = self.model_map.dtype
        moments = moment_types(self.basic_optimizer, weight)
        return ElementTypes(weight=weight, gradient=self.get_data_types()[1], moments=moments)

    def state_buffers(self) -> tuple[Buffers, Scalars]:
        """The live flat buffers of this rank, and the optimizer's scalars."""
        return self.stage_adapter.describe(self, self.model_map)

    def state_census(self) -> list[Found]:
        """Where DeepSpeed itself says that each element lies."""
        return self.stage_adapter.census(self, self.model_map)

    def detach(self) -> None:
        """Take the ZeRO optimizer off the module. Buffers live on with whoever holds them; parameters keep no gradient.

        The module's parameters keep their data under stages 0 to 2 and are empty after stage 3.
        """
        old, adapter = self.optimizer, self.stage_adapter
        if hasattr(old, "destroy"):
            old.destroy()
        adapter.release(self, self.model_map)
        self.basic_optimizer.state.clear()
        for group, parameters in zip(self.basic_optimizer.param_groups, self.model_map.groups, strict=True):
            group["params"] = list(parameters)
        self.optimizer = self.basic_optimizer
        if old is not self.basic_optimizer:
            old.__dict__.clear()  # it sits in reference cycles: its memory must not wait for the collector

    def make_children(self, layout: Layout, rank: int) -> Made | None:
        """What `reshape` can do ahead, in any thread; None if there is nothing."""
        return None if Shape.of(layout, rank) == self.shape else self.shaper.make(layout, rank)

    def reshape(
        self, layout: Layout, rank: int, tensors: Sequence[LogicalTensor], made: Made | None = None
    ) -> Replaced | None:
        """Give the module the children of `rank` under `layout`, whose world must be installed; nothing is attached.

        tensors: the local ones of that rank. made: by `make_children`, if it was asked. Returns what `undo_reshape`
        takes, None if nothing had to change.
        """
        shape = Shape.of(layout, rank)
        if shape == self.shape:
            return None
        before = Replaced(self.shape, Children.of(self.module), self.model_map, self.param_names)
        try:
            self.shaper.reshape(self.module, layout, made)
            self._mark_for_autocast()
            before.children.pass_on(self.module)
            parameters = self.shaper.parameters(self.module, layout)
            self._take(shape, self.model_map.reshaped(parameters, tensors))
        except BaseException:
            self.undo_reshape(before)
            raise
        return before

    def _mark_for_autocast(self) -> None:
        """Say on new parameters, as DeepSpeed did on those before, in which type ranks add their gradients up."""
        if self.torch_autocast_enabled():
            modules = self.torch_autocast_lower_precision_safe_modules()
            init_autocast_params(self, self.torch_autocast_dtype(), modules)

    def undo_reshape(self, before: Replaced) -> None:
        """Go back to what `reshape` replaced; nothing may be attached."""
        before.children.put_back(self.module)
        self._take(before.shape, before.model)
        self.param_names = before.names

    def _take(self, shape: Shape, model: ModelMap) -> None:
        """Speak of these parameters from now on, in the basic optimizer, too."""
        self.shape = shape
        self.param_names = {parameter: name for name, parameter in self.module.named_parameters()}
        for group, parameters in zip(self.basic_optimizer.param_groups, model.groups, strict=True):
            group["params"] = list(parameters)
        self._gathers.stop()
        self._gathers = GatherWatch(model.parameters)
        self.adopt(model, self.basic_optimizer.param_groups)

    def forget_steps(self) -> None:
        """What the optimizer keeps outside of its state, on all members alike; after a commit."""
        forget_running_products(self.basic_optimizer)

    def let_module_go(self) -> None:
        """Remove what DeepSpeed and this class keep on the module, and in torch, for as long as the engine lives."""
        self._gradients.stop()
        self._gathers.stop()
        self.compilations.stop()
        for hook in ("module_forward_pre_hook", "module_forward_post_hook"):
            if hook in self.__dict__:
                self.__dict__.pop(hook).remove()
                restore_linear()  # once: DeepSpeed calls `destroy` again when the engine is collected
                forget_traces()

    def leave_world(self) -> None:
        """Leave names and objects, no data and no group: the state of an idle member."""
        self.shaper.leave(self)
        self.data_parallel_group = self.seq_data_parallel_group = None
        self.global_rank = -1
        sequence.leave(self)
        for parameter in self.model_map.parameters:
            parameter.grad = None
            parameter.data = torch.empty(0, dtype=self.model_map.dtype, device=parameter.device)

    def attach(
        self, layout: Layout, world: World, config: tuple[dict[str, Any], Any], buffers: Buffers, scalars: Scalars
    ) -> None:
        """Put a ZeRO optimizer of `layout` on the module, with `buffers` as its memory; no message, no allocation.

        `world` must be installed. Nothing of the old layout may be attached.
        """
        self._enter_world(world, layout, config)
        self._give_shapes(layout)
        reset_counters()
        if layout.zero_stage > 0 or parts_without_zero(self):
            names = {held: name for held, name in self.param_names.items() if not name.startswith(IN_HOLLOW_GROUP)}
            self.param_names = {**names, **fill_hollow_groups(self.basic_optimizer, self.model_map)}
        with hollow(self.basic_optimizer):
            super()._configure_optimizer(self.basic_optimizer, None)
        self.basic_optimizer.state.clear()
        self.stage_adapter.refill(self, self.model_map, buffers, scalars)
        self._after_attach()

    def _give_shapes(self, layout: Layout) -> None:
        """Parameters that have no data get some that nobody reads.

        Stage 3 cuts them one after the other, and all lie in one place until then: a process may not have the memory
        for all of them.
        """
        every = zip(self.model_map.tensors, self.model_map.parameters, strict=True)
        bare = [(tensor.shape, held) for tensor, held in every if held.shape != tensor.shape]
        largest = max((math.prod(shape) for shape, _ in bare), default=0)
        dtype, shared = self.model_map.dtype, torch.empty(0)
        for shape, held in bare:
            if layout.zero_stage < 3:
                held.data = torch.empty(shape, dtype=dtype, device=held.device)
                continue
            if not shared.numel():
                shared = torch.empty(largest, dtype=dtype, device=held.device)
            held.data = shared[: math.prod(shape)].view(shape)

    def _enter_world(self, world: World, layout: Layout, config: tuple[dict[str, Any], Any]) -> None:
        self.config, self._config = config
        self.world_size, self.dp_world_size = layout.world_size, layout.data
        self.seq_dp_world_size = layout.data * layout.sequence
        self.mp_world_size = layout.pipe * layout.tensor
        self.global_rank = -1 if world.rank is None else world.rank
        self.data_parallel_group, self.seq_data_parallel_group = world.group("data_only"), world.data
        self.mpu = world.mpu
        self.checkpoint_mp_rank = 0 if world.mpu is None else world.mpu.get_model_parallel_rank()
        sequence.enter(self, world, layout)
        self.shaper.enter(self, layout)

    def _after_attach(self) -> None:
        """What DeepSpeed's constructor does after its optimizer stands."""
        self._support_torch_style_backward = (
            isinstance(self.optimizer, ZeROOptimizer) and check_internal_apis_for_count_used_parameters()
        )
        if self._support_torch_style_backward:
            self.optimizer.register_grad_acc_post_hook(self._backward_post_hook)
        self.save_non_zero_checkpoint = self.save_zero_checkpoint = False
        self._configure_checkpointing()
        self.tput_timer.batch_size = self.train_batch_size()

    @property
    def open_gathers(self) -> int:
        """Number of `GatheredParameters` blocks that the user has open over parameters of this engine."""
        return self._gathers.count

    def drop_gradients(self) -> None:
        """Forget the gradients of an open window, wherever the present optimizer keeps them."""
        for parameter in self.model_map.parameters:
            parameter.grad = None
        self.optimizer.zero_grad()
        self._gradients.missing()

    def break_off(self) -> None:
        """Be through with a call of DeepSpeed's that an error has ended: a timer that runs does not start again."""
        for timer in self.timers.get_timers().values():
            if timer.started_:
                timer.stop()

    @property
    def waiting_gradients(self) -> int:
        """Number of parameters with a gradient that no optimizer step has used yet."""
        return self._gradients.waiting

    def adopt(self, model: ModelMap, groups: list[dict[str, Any]]) -> None:
        """Speak of other optimizer groups from now on; nothing may be attached."""
        self._gradients.stop()
        self.model_map = model
        self.basic_optimizer.param_groups[:] = groups
        self._gradients = GradientWatch(model)

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        *others: Any,
        **named: Any,
    ) -> Any:
        """DeepSpeed's. In stage 0, too, weights that come without the optimizer's states become the masters.

        DeepSpeed does so in its other stages alone: in stage 0 the old masters stay, and the next step writes over what
        was loaded.
        """
        found = super().load_checkpoint(load_dir, tag, load_module_strict, load_optimizer_states, *others, **named)
        has_masters = not self.zero_optimization() and hasattr(self.optimizer, "refresh_fp32_params")
        if found[0] is not None and not load_optimizer_states and has_masters:
            self.optimizer.refresh_fp32_params()
        return found

    def settle_parameters(self) -> None:
        """Bring stage 3's parameters back to their parts (an evaluation may have left some gathered)."""
        if int(self.zero_optimization_stage()) == 3:
            self.optimizer.parameter_offload.partition_all_parameters()

    # ---- exact batches -------------------------------------------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, tokens: int | None = None
    ) -> torch.Tensor:
        """DeepSpeed's `backward`, with the loss weighted by the samples that the loader dealt to this micro-batch.

        tokens: the number of tokens that `loss` is the mean over; then the window's gradient is the mean over all of
        its tokens, in whatever world. Give it for every micro-batch of a window or for none.
        """
        if tokens is not None:
            count = 0 if self.slot_is_borrowed else int(tokens)
            self.window_tokens = (self.window_tokens or 0) + count
            self.slot_weight = float(count)
        weight = self._loss_weight
        self._is_weighted = True  # the loss is, so its gradients are not again
        forgotten = scaler.forgotten_scale(self)
        try:
            weighted = loss if weight == 1.0 else loss * weight
            if forgotten != 1.0:
                weighted = weighted.float() * forgotten
            scaled: torch.Tensor = super().backward(weighted, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
            return scaled if forgotten == 1.0 else scaled / forgotten
        finally:
            self._is_weighted = False
            self.slot_weight = self.slot_weight if tokens is None else 1.0

    def _backward_prologue_per_tensor(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Also weight `loss.backward()`, which does not pass through `backward`."""
        scaled: torch.Tensor | None = super()._backward_prologue_per_tensor(grad)
        if scaled is None or scaled is grad or self._is_weighted or self._loss_weight == 1.0:
            return scaled
        return scaled * self._loss_weight

    @property
    def _loss_weight(self) -> float:
        return self.slot_weight * sequence.loss_factor(self)

    def clip_fp32_gradients(self) -> None:
        """DeepSpeed's, without ZeRO; its norm would depend on how many ranks share the experts."""
        if self.shape.expert > 1:
            clip_with_experts(self.module, self.gradient_clipping(), self.layout)
        else:
            super().clip_fp32_gradients()

    def _take_model_step(self, *arguments: Any) -> None:
        """DeepSpeed's optimizer step, its gradients divided by tokens if the window was weighted by them."""
        counted = all_counted(self.module, self.layout)
        with divided_by_tokens(self, self.window_tokens), scaler.true_norm(self), counted:
            super()._take_model_step(*arguments)
        self.window_tokens = None
        self.without_gradient = self._gradients.missing()
