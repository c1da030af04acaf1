"""Operations on DeepSpeed's engine that a live switch needs: replacing its optimizer and reshaping its module.

ZeRO-3 steps a parameter that got no gradient with the last gradient that it had, so a hook records which parameters get
a gradient.

An evaluation may leave ZeRO-3's parameters gathered by DeepSpeed's own hooks. No code depends on such parameters, and a
switch simply partitions them again. A user's own `GatheredParameters` block is different: a switch would take away the
values that the block reads, and the end of the block would partition parameters into memory that is gone. DeepSpeed
keeps no list of open blocks, so the class's `__init__`, `__enter__` and `__exit__` are wrapped while an engine lives,
and restored when the engine is destroyed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.torch_autocast import init_autocast_params
from deepspeed.runtime.utils import check_internal_apis_for_count_used_parameters
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

from ds_dynatrain.adapters.deepspeed.curriculum import CurriculumOrder
from ds_dynatrain.adapters.groups.device import compute_device, synchronize
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.adapters.model import moe
from ds_dynatrain.adapters.model import ulysses as sequence
from ds_dynatrain.adapters.model.module_state import forget
from ds_dynatrain.adapters.model.shaper import Made, Shaper
from ds_dynatrain.adapters.model.shaping import WHOLE_SHAPE, Children, Shape
from ds_dynatrain.adapters.versions.compiled import CompileWatch, compiled_in_place
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.adapters.zero import loss_scale as scaler
from ds_dynatrain.adapters.zero.deepspeed_config import Settings
from ds_dynatrain.adapters.zero.logical_model import ModelMap
from ds_dynatrain.adapters.zero.no_alloc import no_alloc, stand_in
from ds_dynatrain.adapters.zero.optimizers import moment_types
from ds_dynatrain.adapters.zero.stages import forget_traces, in_order, reset_counters, restore_linear, stage_of
from ds_dynatrain.adapters.zero.state import Buffers, ElementTypes, Memory, Scalars, place_of
from ds_dynatrain.adapters.zero.zero_stage import fill_empty_groups
from ds_dynatrain.space import IN_EMPTY_GROUP, MASTER, Layout, LogicalTensor
from ds_dynatrain.space.leaves import MicroStep

_ASKED = "_dynatrain_asked"


class GatherWatch:
    """A watch on the open `GatheredParameters` blocks that contain a parameter of an engine, in any ZeRO stage.

    open: ids of the open blocks.
    """

    _all: ClassVar[set[GatherWatch]] = set()
    _wrapped: ClassVar[ExitStack] = ExitStack()

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.open, self._mine = set[int](), {*map(id, parameters)}
        if not self._all:
            self._wrap()
        self._all.add(self)

    @classmethod
    def _wrap(cls) -> None:
        init, enter, leave = GatheredParameters.__init__, GatheredParameters.__enter__, GatheredParameters.__exit__

        @functools.wraps(init)
        def note(block: Any, params: Any, *arguments: Any, **named: Any) -> None:
            """Record which parameters a `GatheredParameters` block asks for. Below stage 3, DeepSpeed ignores such a
            block.
            """
            listed = [*params] if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else [params]
            init(block, listed, *arguments, **named)
            asked = arguments[2] if len(arguments) > 2 else named.get("enabled", True)
            block.__dict__[_ASKED] = {*map(id, listed)} if asked else set()

        @functools.wraps(enter)
        def opened(block: Any) -> Any:
            entered = enter(block)
            for watch in cls._all:
                if watch._mine & block.__dict__.get(_ASKED, set()):
                    watch.open.add(id(block))
            return entered

        @functools.wraps(leave)
        def closed(block: Any, *error: Any) -> Any:
            for watch in cls._all:
                watch.open.discard(id(block))
            return leave(block, *error)

        own = replaced(GatheredParameters, __init__=note, __enter__=opened, __exit__=closed)
        cls._wrapped.enter_context(own)

    def stop(self) -> None:
        """Stop watching, and restore DeepSpeed's methods unless another engine still watches. May be called twice."""
        self.open.clear()
        self._all.discard(self)
        if not self._all:
            self._wrapped.close()


class GradientWatch:
    """Hooks on the trainable parameters that record which parameters get a gradient.

    seen: names of the parameters that got a gradient since the last call of `missing`.
    """

    def __init__(self, model: ModelMap) -> None:
        pairs = zip(model.tensors, model.parameters, strict=True)
        held = {tensor.name: parameter for tensor, parameter in pairs if tensor.trainable and tensor.numel}
        self._names = tuple(held)
        self.seen: set[str] = set()
        self._hooks = [
            each.register_post_accumulate_grad_hook(lambda _, seen=self.seen, name=name: seen.add(name))
            for name, each in held.items()
        ]

    def missing(self) -> tuple[str, ...]:
        """Return the names of the parameters that got no gradient since the last call."""
        names = tuple(name for name in self._names if name not in self.seen)
        self.seen.clear()
        return names

    def stop(self) -> None:
        """Remove the hooks from the parameters."""
        while self._hooks:
            self._hooks.pop().remove()


@dataclass(frozen=True, eq=False)
class Replaced:
    """State of a host before a reshape of its module, from which `undo_reshape` restores it.

    shape: the sizes of the axes, and this member's index on each, before the reshape.
    children: the module's children before the reshape.
    model: the map from parameters to logical tensors before the reshape.
    names: a map from each parameter to its name before the reshape.
    """

    shape: Shape
    children: Children
    model: ModelMap
    names: dict[nn.Parameter, str]


@dataclass(eq=False)
class Host:
    """State that this package keeps alongside DeepSpeed's engine, and the operations on that engine.

    A leaf is a micro-batch that holds the same samples in every world. A window here is the accumulation window: the
    micro-batches of one optimizer step.

    engine: DeepSpeed's engine (`host_engine.HostEngine`).
    layout: the layout that is attached to the module, or the last one that was.
    global_batch_size: number of samples per optimizer step, even if DeepSpeed's three batch sizes cannot express it.
    attaches: whether the engine is built with a ZeRO optimizer. An idle member's engine has none; it holds only the
        parameters' names and shapes.
    whole: whether the parameters are whole when the engine is built. If not, `attach_first` is called once their values
        have arrived.
    shape: the pipe, expert and tensor sizes of the module's children, and this member's index on these axes.
    slot_weight: weight of the loss of the last micro-batch assigned.
    slot_is_borrowed: whether the last micro-batch repeats another rank's sample.
    loss_is_divided: whether the loss of the last micro-batch needs no weight.
    window_tokens: number of tokens in the open window on this rank; None if no counts were given.
    without_gradient: names of the trainable parameters that got no gradient on this rank in the last window.
    is_weighted: whether the loss of the current backward pass is already weighted, so that its gradients must not be.
    is_own_optimizer: whether DeepSpeed builds the optimizer from the configuration.
    in_leaves: whether micro-batches are leaves.
    micro_step: the current assignment of leaves to ranks; None between two global batches.
    """

    engine: Any
    layout: Layout
    shaper: Shaper
    global_batch_size: int
    attaches: bool
    whole: bool
    shape: Shape = WHOLE_SHAPE
    slot_weight: float = 1.0
    slot_is_borrowed: bool = False
    loss_is_divided: bool = False
    window_tokens: int | None = None
    without_gradient: tuple[str, ...] = ()
    is_weighted: bool = False
    is_own_optimizer: bool = False
    in_leaves: bool = False
    micro_step: MicroStep | None = None
    model_map: ModelMap = field(init=False)
    """Assignment of this rank's parameters to the logical tensors, which have their local shapes."""
    present_config: Settings = field(init=False)
    """DeepSpeed's current configuration: the dictionary and its parsed form."""
    compilations: CompileWatch = field(init=False)
    gradients: GradientWatch = field(init=False)
    gathers: GatherWatch = field(init=False)
    _scaling: scaler.State = field(init=False)

    forward_passes = cast("int | None", None)
    """Number of forward passes so far if DeepSpeed seeds layers with this number, otherwise None."""

    # ---- DeepSpeed's objects -----------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The module that DeepSpeed's engine trains, as it is on this rank."""
        module: nn.Module = self.engine.module
        return module

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's current optimizer object; a switch replaces it."""
        return self.engine.optimizer

    @property
    def basic_optimizer(self) -> Any:
        """The torch optimizer inside DeepSpeed's optimizer: one object for the whole job."""
        return self.engine.basic_optimizer

    # ---- parameters and state ----------------------------------------------------------------------------------------

    def look(self, basic: torch.optim.Optimizer) -> None:
        """Record the engine's parameters and optimizer groups before ZeRO replaces them.

        basic: the torch optimizer with which the engine is built.
        """
        self.model_map = ModelMap.of(self.module, [group["params"] for group in basic.param_groups])
        self.gradients = GradientWatch(self.model_map)
        self.gathers = GatherWatch(self.model_map.parameters)
        self.compilations = CompileWatch()
        self.present_config = self.engine.config, self.engine._config
        self._scaling = scaler.first_state(self.engine)

    def attach_first(self, layout: Layout, world: World, config: Settings, buffers: Buffers) -> None:
        """Attach the first ZeRO optimizer, and initialize its state the way DeepSpeed's constructors do."""
        self.model_map.drop_data()
        self.attach(layout, world, config, buffers, Scalars())
        if isinstance(self.optimizer, FP16_UnfusedOptimizer | FP16_Optimizer):
            self.optimizer.initialize_optimizer_states()  # steps on zeros, which counts, and decays masters

    def curriculum_order(self, length: int) -> CurriculumOrder | None:
        """Return the configured curriculum's order over `length` samples; None if no curriculum is configured."""
        block = self.engine.data_efficiency_config()
        on = block["data_sampling"]["curriculum_learning"]["enabled"]
        return CurriculumOrder(length, self.global_batch_size, block) if on else None

    @property
    def ends_window_by_hand(self) -> bool:
        """Whether the user, rather than DeepSpeed's count, decides that the next `step` ends the accumulation window.

        The user does so by calling `set_gradient_accumulation_boundary(True)`, or by setting
        `managed_gradient_accumulation` to false (in DeepSpeed 0.18 it is always true).
        """
        managed = getattr(type(self.engine), "managed_gradient_accumulation", None)
        return bool(self.engine._is_gradient_accumulation_boundary) or not (managed is None or managed(self.engine))

    @property
    def compiled_modules(self) -> list[str]:
        """Names of the compiled modules; equal on all members."""
        return compiled_in_place(self.module)

    def scaling_state(self) -> scaler.State:
        """Return all fields of the loss scale, including those that the current optimizer does not have."""
        places = scaler.places(self.optimizer).items()
        held = {key: scaler.plain(getattr(*place)) for key, place in places if key in self._scaling}
        return {**self._scaling, **held}

    def take_scaling(self, state: scaler.State) -> None:
        """Set the fields that `scaling_state` has returned. Fields that the current optimizer lacks are kept for a
        later layout."""
        self._scaling = dict(state)
        for key, place in scaler.places(self.optimizer).items():
            if key in state:
                setattr(*place, state[key])

    def take_grad_norm(self, norm: float | None) -> None:
        """Set the gradient norm of the last step on a member that did not take that step."""
        self.engine._global_grad_norm = None if norm is None else torch.tensor(norm, device=self.engine.device)
        self._pass_grad_norm_on()

    def _pass_grad_norm_on(self) -> None:
        """Give a new optimizer the gradient norm of the last step, if optimizers of its kind report norms."""
        if hasattr(self.optimizer, "_global_grad_norm") and self.engine._global_grad_norm is not None:
            self.optimizer._global_grad_norm = self.engine._global_grad_norm

    @property
    def element_types(self) -> ElementTypes:
        """Element type of each state, determined by the model and the configuration; the same in every layout."""
        weight = self.model_map.dtype
        moments = moment_types(self.basic_optimizer, weight)
        return ElementTypes(weight=weight, gradient=self.engine.get_data_types()[1], moments=moments)

    def memory(self, kinds: tuple[str, ...], layout: Layout) -> dict[str, Memory]:
        """Return a map from each state kind to the element type and memory of its buffers under a layout."""
        types, config = self.element_types, self.engine._config
        return {kind: Memory(types.of(kind), place_of(config, kind, layout.zero_stage)) for kind in kinds}

    def state_buffers(self) -> tuple[Buffers, Scalars]:
        """Return this rank's current flat buffers, and the optimizer's scalars.

        First waits until an accelerator has finished all work queued on every stream.
        """
        synchronize()
        return stage_of(self.engine, self.model_map).describe()

    def detach(self) -> None:
        """Remove the ZeRO optimizer from the module.

        The optimizer's buffers are freed once no caller holds them. Parameters lose their gradients. They keep their
        data in stages 0 to 2, and are empty after stage 3.
        """
        old, stage = self.optimizer, stage_of(self.engine, self.model_map)
        if hasattr(old, "destroy"):
            old.destroy()
        stage.release()
        self.basic_optimizer.state.clear()
        for group, parameters in zip(self.basic_optimizer.param_groups, self.model_map.groups, strict=True):
            group["params"] = list(parameters)
        self.engine.optimizer = self.basic_optimizer
        if old is not self.basic_optimizer:
            old.__dict__.clear()  # free its memory, which reference cycles hold

    def make_children(self, layout: Layout, rank: int) -> Made | None:
        """Build ahead of time the children that `reshape` will give the module. Returns None if they stay the same.

        May be called in any thread.

        layout, rank: the layout after the switch, and this member's rank in it.
        """
        return None if Shape.of(layout, rank) == self.shape else self.shaper.make(layout, rank)

    def reshape(
        self, layout: Layout, rank: int, tensors: Sequence[LogicalTensor], made: Made | None = None
    ) -> Replaced | None:
        """Give the module the children of `rank` under `layout`.

        Returns what `undo_reshape` needs, or None if nothing changed.

        The world of `layout` must be installed, and no optimizer may be attached.

        tensors: the local tensors of `rank`.
        made: the result of `make_children`, if it was called.
        """
        shape = Shape.of(layout, rank)
        if shape == self.shape:
            return None
        before = Replaced(self.shape, Children.of(self.module), self.model_map, self.engine.param_names)
        try:
            self.shaper.reshape(self.module, layout, made)
            if self.engine.torch_autocast_enabled():  # mark new parameters as DeepSpeed marked the former ones
                modules = self.engine.torch_autocast_lower_precision_safe_modules()
                init_autocast_params(self.engine, self.engine.torch_autocast_dtype(), modules)
            is_resized = (shape.expert, shape.tensor) != (before.shape.expert, before.shape.tensor)
            before.children.pass_on(self.module, is_resized)
            self._take(shape, self.model_map.reshaped(moe.parameters(self.module, layout), tensors))
        except BaseException:
            self.undo_reshape(before)
            raise
        return before

    def undo_reshape(self, before: Replaced) -> None:
        """Restore the module's children, parameters and names that `reshape` replaced. No optimizer may be attached."""
        before.children.put_back(self.module)
        self._take(before.shape, before.model)
        self.engine.param_names = before.names

    def _take(self, shape: Shape, model: ModelMap) -> None:
        """Use the parameters of `model` from now on, also in the basic optimizer.

        shape: the sizes of the axes, and this member's index on each, for which the parameters are.
        """
        self.shape = shape
        self.engine.param_names = {parameter: name for name, parameter in self.module.named_parameters()}
        self.gathers.stop()
        self.gathers = GatherWatch(model.parameters)
        self.adopt(model, self.basic_optimizer.param_groups)

    def let_module_go(self) -> None:
        """Undo what DeepSpeed and this object have set on the module and in torch. The engine itself is kept."""
        self.gradients.stop()
        self.gathers.stop()
        forget(self.module)
        self.compilations.stop()
        for hook in ("module_forward_pre_hook", "module_forward_post_hook"):
            if hook in self.engine.__dict__:
                self.engine.__dict__.pop(hook).remove()
                restore_linear()  # DeepSpeed calls `destroy` again later; restore it once
                forget_traces()

    def leave_world(self) -> None:
        """Release the world's data and process groups on a member that becomes idle, but keep the names and objects it
        needs.
        """
        self.leave_shape()
        self.engine.data_parallel_group = self.engine.seq_data_parallel_group = None
        self.engine.global_rank = -1
        sequence.leave(self.engine)
        self.model_map.drop_data()

    def attach(self, layout: Layout, world: World, config: Settings, buffers: Buffers, scalars: Scalars) -> None:
        """Build the ZeRO optimizer for `layout` on the module, with `buffers` as its memory.

        Sends no message and allocates no memory. `world` must be installed, and the old layout must be detached. An
        optimizer that accumulates gradients or offloads keeps the zero-filled tensors that it makes, because they are
        its gradient buffers.

        config: DeepSpeed's configuration for this layout.
        scalars: the values of the optimizer's scalars, such as step counts.
        """
        self._enter_world(world, layout, config)
        engine, basic, model = self.engine, self.basic_optimizer, self.model_map
        for tensor, held in zip(model.tensors, model.parameters, strict=True):
            if held.shape != tensor.shape:  # without data; DeepSpeed reads the shape
                held.data = stand_in(tensor.shape, model.dtype, held.device)
        reset_counters()
        restore_linear()  # some members may have replaced it before they joined
        names = {held: name for held, name in engine.param_names.items() if not name.startswith(IN_EMPTY_GROUP)}
        engine.param_names = {**names, **fill_empty_groups(basic, model)}
        stage, (weight, gradient) = layout.zero_stage, engine.get_data_types()
        is_accumulating = stage == 1 and weight != gradient  # BF16_Optimizer
        offloads = place_of(engine._config, MASTER, stage).device != compute_device()
        keeps_zeros = stage == 0 or is_accumulating or offloads
        with in_order(engine, model, layout.order), no_alloc(basic, keeps_zeros):
            engine._configure_zero(basic)
        basic.state.clear()
        stage_of(engine, model).refill(buffers, scalars)
        is_zero = isinstance(self.optimizer, ZeROOptimizer)  # from here on, what DeepSpeed's constructor does next
        engine._support_torch_style_backward = is_zero and check_internal_apis_for_count_used_parameters()
        if engine._support_torch_style_backward:
            self.optimizer.register_grad_acc_post_hook(engine._backward_post_hook)
        engine.save_non_zero_checkpoint = engine.save_zero_checkpoint = False
        engine._configure_checkpointing()
        engine.tput_timer.batch_size = engine.train_batch_size()
        self._pass_grad_norm_on()

    def _enter_world(self, world: World, layout: Layout, config: Settings) -> None:
        engine, self.layout = self.engine, layout
        engine.config, engine._config = self.present_config = config
        engine.world_size, engine.dp_world_size = layout.world_size, layout.data
        engine.seq_dp_world_size = layout.data * layout.sequence
        engine.mp_world_size = layout.pipe * layout.tensor
        engine.global_rank = -1 if world.rank is None else world.rank
        engine.data_parallel_group = world.group("data_only")
        engine.seq_data_parallel_group = world.group("data")
        engine.mpu = world.mpu
        engine.checkpoint_mp_rank = 0 if world.mpu is None else world.mpu.get_model_parallel_rank()
        sequence.enter(engine, world, layout)
        self.shaper.enter(engine, layout)

    def drop_gradients(self) -> None:
        """Drop the gradients accumulated since the last optimizer step, wherever the current optimizer keeps them."""
        for parameter in self.model_map.parameters:
            parameter.grad = None
        self.optimizer.zero_grad()
        self.gradients.missing()

    def optimizer_made(self) -> None:
        """Adapt an optimizer that DeepSpeed has just built, before its first step. A hook for subclasses."""

    def break_off(self) -> None:
        """Clean up after an error has ended a DeepSpeed call.

        Stops the timers that are running, because a running timer cannot be started again.
        """
        for timer in self.engine.timers.get_timers().values():
            if timer.started_:
                timer.stop()

    def adopt(self, model: ModelMap, groups: list[dict[str, Any]]) -> None:
        """Use the parameters of `model` and other optimizer groups from now on. No optimizer may be attached.

        groups: the new optimizer groups. Their parameters are set to those of `model`.
        """
        self.gradients.stop()
        self.model_map = model
        self.basic_optimizer.param_groups[:] = groups
        for group, parameters in zip(groups, model.groups, strict=True):
            group["params"] = list(parameters)
        self.gradients = GradientWatch(model)

    def settle_parameters(self) -> None:
        """Partition all parameters again at stage 3, because an evaluation may have left some gathered."""
        if int(self.engine.zero_optimization_stage()) == 3:
            self.optimizer.parameter_offload.partition_all_parameters()

    @property
    def loss_weight(self) -> float:
        """Factor by which to multiply the loss of the current micro-batch."""
        weight = float(not self.slot_is_borrowed) if self.loss_is_divided else self.slot_weight
        # DeepSpeed takes the mean over data ranks and the sum over sequence ranks. Stage 3, which reduces and scatters
        # in one operation, takes the mean over both.
        is_mean = int(self.engine.zero_optimization_stage()) == 3
        return weight * (float(self.engine.sequence_parallel_size) if is_mean else 1.0)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Update the fields that DeepSpeed's optimizer step leaves unchanged. Called after each step."""
        if not hasattr(self.optimizer, "_global_grad_norm"):  # torch's own optimizer at stage 0 computes no norm
            self.engine._global_grad_norm = None
        self.window_tokens = None
        self.without_gradient = self.gradients.missing()

    def leave_shape(self) -> None:
        """Release the world's process groups that the model's layers hold."""
        self.shaper.leave(self.engine)

    def put_in_place(self) -> None:
        """Set DeepSpeed's process-wide state, except for groups, for this engine. A hook for subclasses."""
