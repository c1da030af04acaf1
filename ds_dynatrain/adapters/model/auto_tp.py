"""The tensor axis: DeepSpeed's AutoTP, run on modules without storage, and a root module that gets AutoTP's layers.

AutoTP replaces linear layers and embeddings with layers that hold one part of each parameter, and records on the
parameter how it was cut. In this package AutoTP runs on a copy of the template whose parameters are on the meta device,
so it needs no memory and sends no message. Layers that AutoTP leaves alone are whole on every rank of the axis.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from weakref import WeakMethod

import deepspeed.comm as dist
import torch
import torch.distributed as td
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META, UNIVERSAL_CHECKPOINT_INFO
from deepspeed.module_inject import auto_tp, set_autotp_mode
from deepspeed.module_inject.layers import (
    TensorParallel_Layer,
    configure_tensor_parallel_runtime,
    is_autotp_training_mode,
)
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.sequence.cross_entropy import VocabParallelCausalLMLoss
from deepspeed.utils import groups
from torch import nn

from ds_dynatrain.adapters.groups.process_groups import make_fake_group, register, unregister
from ds_dynatrain.adapters.model.auto_ep import Conversion, UserTensor, replace_layers, user_tensors, validate
from ds_dynatrain.adapters.model.moe import leave_groups, refuse_other_axes
from ds_dynatrain.adapters.model.shaper import Cuts, Made, ModelFactory, Shaper, copied, template_of
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.adapters.versions.torch_versions import attends_without_heads
from ds_dynatrain.errors import LayoutError, UnsupportedError
from ds_dynatrain.space import WHOLE, AxisCuts, DimCut, Layout
from ds_dynatrain.support.row import Config

WRONG: Mapping[str, str] = {
    "bloom": "AutoTP cuts its fused query_key_value across heads, and would compute something else",
    "falcon": "its attention counts all heads, whatever its rank holds",
    "gpt_bigcode": "AutoTP gives every rank all keys and values, and never adds their gradients up",
    "mpt": "its attention counts all heads, whatever its rank holds",
}
"""Types of Hugging Face models that train wrongly after AutoTP has cut them (measured with DeepSpeed 0.19.8)."""


def settings(config: Config, size: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration block for AutoTP with a tensor size. Size 1 turns AutoTP off."""
    block = {**(config.get("tensor_parallel") or {}), "autotp_size": size if size > 1 else 0}
    for name in ("tp", "tensor_parallel"):
        if name in block:
            block[name] = {key: value for key, value in block[name].items() if key != "tp_size"}
    return block


def partition(model: nn.Module, config: Config, size: int, place: int) -> None:
    """Make AutoTP cut a model on the meta device for the rank at index `place` of a tensor group of `size` ranks.

    Needs no peers and no particular world. Any thread may call this, but only one at a time. The new layers refer to a
    group that ends with this call; give them the world's group before they are used.
    """
    engine = SimpleNamespace(
        autotp_size=lambda: size,
        local_rank=-1,
        is_deepcompile_enabled=lambda: False,
        compile_autotp=lambda: False,
    )
    real = dict(model.named_buffers())
    block = TPTrainingConfig(**settings(config, size))
    # AutoTP spends half of its time printing every module sixteen times, to search the text for one model's name
    said_once = replaced(nn.Module, __repr__=cache(nn.Module.__repr__))
    with _for_training(), _tensor_group(size, place) as block.tensor_parallel.tp_group, said_once:
        DeepSpeedEngine._apply_autotp_partitioning(engine, model, block)
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:  # AutoTP moved the buffer together with a weight
                module._buffers[key] = real[f"{prefix}.{key}"]


def describe(template: nn.Module, config: Config, size: int) -> Cuts:
    """Return a map from each parameter's name to how AutoTP would cut it into `size` parts. Needs no peers.

    Raises UnsupportedError, naming the parameter, if AutoTP does not record how it cuts a parameter, or would cut it
    wrongly. Errors that AutoTP itself raises for a model or a size pass through.
    """
    made = copied(template)
    partition(made, config, size, 0)
    before = dict(template.named_parameters())
    after = dict(made.named_parameters())
    if set(before) != set(after):
        raise UnsupportedError(
            f"{min(set(before) ^ set(after))!r} is no longer tied to the parameter it was tied to; untie the two "
            "before initialize"
        )
    for name, module in made.named_modules():
        origin = template.get_submodule(name) if isinstance(module, TensorParallel_Layer) else None
        if origin is not None and not isinstance(origin, nn.Linear | nn.Embedding):
            raise UnsupportedError(
                f"{name!r} is a {type(origin).__name__}, which AutoTP takes for an nn.Linear; name it otherwise, or "
                "leave it out of the plan (tensor_parallel.partition_config)"
            )
    found = {name: _cut(name, tuple(before[name].shape), held) for name, held in after.items()}
    if all(cut.tensor is None for cut in found.values()):
        raise UnsupportedError(
            f"its rules cut none of the {len(found)} parameters; name those to cut in tensor_parallel.partition_config"
        )
    return found


def refuse_empty(found: Cuts, config: Config, layout: Layout) -> None:
    """Raise LayoutError if a rank would get no element of a parameter of which DeepSpeed or torch needs one."""
    if layout.zero_stage == 3:
        why = "zero_stage=3"
    elif (config.get("tensor_parallel") or {}).get("tp_overlap_comm", False):
        why = "tp_overlap_comm"
    elif not attends_without_heads():
        why = f"torch {torch.__version__} (before 2.12)"
    else:
        return
    for name, cut in found.items():
        blocks = cut.tensor.blocks if isinstance(cut.tensor, DimCut) else ()
        sizes = [sum(each) for each in zip(*blocks, strict=True)]
        if 0 in sizes:
            raise LayoutError(
                f"{name!r} would be cut into {' + '.join(map(str, sizes))}, and {why} needs elements on every rank; "
                "choose a smaller tensor size"
            )


def _cut(name: str, shape: tuple[int, ...], held: nn.Parameter) -> AxisCuts:
    """Return DeepSpeed's record of how a parameter was cut, converted to `AxisCuts`."""
    written = getattr(held, DS_AUTOTP_UC_META, None)
    if written is None or written["replicated"]:
        return WHOLE
    reason = written["conversion"]["unsupported_reason"]
    widths = written["sub_param_shard_widths"] or [written["partition_sizes"]]
    dim = written["partition_dim"]
    if reason is not None or None in widths or dim is None or written["logical_shape"] != shape:
        raise UnsupportedError(
            f"parameter {name!r}: {reason or 'DeepSpeed does not describe how it is cut'}; leave it out of the plan "
            "(tensor_parallel.partition_config)"
        )
    return AxisCuts(tensor=DimCut(dim, tuple(map(tuple, widths))))


@contextmanager
def _for_training() -> Iterator[None]:
    """Context manager that sets AutoTP to cut for training, and restores its process-wide settings at the end."""
    training, on_host = is_autotp_training_mode(), TensorParallel_Layer.keep_module_on_host
    set_autotp_mode(training=True)
    try:
        yield
    finally:
        set_autotp_mode(training=training)
        TensorParallel_Layer.set_keep_module_on_host(on_host)


@contextmanager
def _tensor_group(size: int, place: int) -> Iterator[td.ProcessGroup]:
    """Context manager that gives AutoTP a tensor group of `size` without peers, with this process at index `place`."""
    rank = td.get_rank()
    ranks = [other for other in range(size) if other != rank][: size - 1]
    group, store = make_fake_group("dynatrain_asked", place, size)
    register(group, store, [*ranks[:place], rank, *ranks[place:]])
    known = SimpleNamespace(
        get_tensor_model_parallel_group=lambda: group, get_tensor_model_parallel_world_size=lambda: size
    )
    try:
        with replaced(auto_tp, groups=known):
            yield group
    finally:
        unregister(group)


_PARSED = "ds_autotp_parsed"
_LOSS_BEFORE = "_deepspeed_original_loss_function"
_PARTIAL = "_ds_grad_allreduce_registered"
"""Attribute that marks parameters whose gradients AutoTP adds up over the ranks."""
_METHODS = {"gather_params", "_tp_partition"}
"""Names of methods of AutoTP's layers that AutoTP also stores as attributes of the layers' parameters."""

_REFUSALS = (AssertionError, ValueError, NotImplementedError, RuntimeError, UnsupportedError, LayoutError)
"""Errors that AutoTP, or our checks of its records, raise to refuse a model or a size."""


class TensorShaper(Shaper):
    """Shaper of a model that AutoTP cuts along the tensor axis."""

    def __init__(self, template: nn.Module | UnsupportedError, config: Config) -> None:
        """Keep the template of a model, or the reason why none can be made."""
        self._template, self._config = template, config
        self._cuts: dict[int, Cuts] = {}
        self._one_at_a_time = threading.Lock()

    @staticmethod
    def of(model: nn.Module, config: Config, factory: ModelFactory | None = None) -> TensorShaper:
        """Return the shaper of a user's model that DeepSpeed has not altered.

        factory: function that builds the model anew if it cannot be copied.
        """
        try:
            return TensorShaper(template_of(model, factory), config)
        except UnsupportedError as error:
            return TensorShaper(error, config)

    def cuts(self, layout: Layout) -> Cuts:
        """Return a map from each logical tensor's name to its cut by the tensor axis.

        Works for any layout, whichever world is installed.

        Raises UnsupportedError, naming the parameter or the model, if AutoTP cannot cut it or does not record how.
        Raises LayoutError, with the nearest valid size, if AutoTP cannot cut the model into that tensor size.
        """
        if layout.pipe * layout.expert > 1:
            raise LayoutError(f"{layout}: this model has no pipeline stages and no experts; leave pipe and expert at 1")
        template, size = self._known, layout.tensor
        if size == 1:
            return dict.fromkeys((name for name, _ in template.named_parameters()), WHOLE)
        kind = getattr(getattr(template, "config", None), "model_type", None)
        if isinstance(kind, str) and kind in WRONG:
            name = type(template).__name__
            raise UnsupportedError(f"tensor parallelism of {name}: {WRONG[kind]}; leave layout.tensor at 1")
        try:
            found = self._described(size)
            refuse_empty(found, self._config, layout)
        except _REFUSALS as error:
            nearest = self._nearest(layout)
            if nearest == 1 and not isinstance(error, LayoutError):
                raise UnsupportedError(
                    f"tensor={size}: AutoTP cannot cut {type(template).__name__}: {error}; or leave layout.tensor at 1"
                ) from error
            raise LayoutError(f"tensor={size}: {error}; nearest: tensor={nearest}") from error
        return found

    def make(self, layout: Layout, rank: int) -> Made:
        """Return the template's children, cut by AutoTP for a rank of a layout."""
        return self.cut(copied(self._known), layout, rank)

    def cut(self, module: nn.Module, layout: Layout, rank: int) -> Made:
        """Cut `module`, a copy of the template, for a rank of `layout`, and return the cut module's children."""
        before = dict(module.__dict__)
        if layout.tensor > 1:
            with self._one_at_a_time:
                partition(module, self._config, layout.tensor, layout.coordinate(rank)["tensor"])
        after = module.__dict__.items()
        return Made(module, {name: value for name, value in after if before.get(name, before) is not value})

    def reshape(self, root: nn.Module, layout: Layout, made: Made | None = None) -> None:
        """Give `root` the children of this rank, and set or remove the attributes that AutoTP sets on a root module.

        made: the children, if `make` has built them; None to build them now.
        """
        origin, loss = self._known, root.__dict__.pop(_LOSS_BEFORE, None)
        if loss is not None:
            root.loss_function = loss
        for name in (_PARSED, UNIVERSAL_CHECKPOINT_INFO):
            root.__dict__.pop(name, None)
            if name in origin.__dict__:
                root.__dict__[name] = origin.__dict__[name]
        super().reshape(root, layout, made)
        for held in root.parameters():
            for name in _METHODS & held.__dict__.keys():
                setattr(held, name, _weakly_bound(getattr(held, name)))
            if getattr(held, _PARTIAL, False):
                held.register_hook(_sum_over_ranks)
        if layout.tensor > 1:
            _speak_over(root, groups.get_tensor_model_parallel_group())

    def enter(self, engine: Any, layout: Layout) -> None:
        """Set in the engine what DeepSpeed's constructor sets for the tensor axis.

        This includes the modes of DeepSpeed's layers and their group, and a hook that compares the first batch between
        tensor ranks. DeepSpeed removes the hook after that batch.
        """
        self.leave(engine)
        block = engine.tensor_parallel_config()
        set_autotp_mode(training=layout.tensor > 1)
        TensorParallel_Layer.set_keep_module_on_host(block.keep_module_on_host)
        configure_tensor_parallel_runtime(block)
        if layout.tensor > 1:
            mpu = engine.mpu
            engine._configure_tensor_parallel_states(engine.module)
            engine.mpu = mpu
            _speak_over(engine.module, groups.get_tensor_model_parallel_group())

    def leave(self, engine: Any) -> None:
        """Remove from the engine the hook that checks the first batch, and from the layers their group."""
        check = engine.__dict__.pop("first_dataloader_check", None)
        if check is not None:
            check.remove()
        _speak_over(engine.module, None)

    def configure(self, config: dict[str, Any], layout: Layout) -> None:
        """Write a layout's tensor size into the configuration. The user's other AutoTP settings stay."""
        if layout.tensor > 1 or config.get("tensor_parallel"):
            config["tensor_parallel"] = settings(config, layout.tensor)

    @property
    def _known(self) -> nn.Module:
        if isinstance(self._template, UnsupportedError):
            raise UnsupportedError(str(self._template))
        return self._template

    def _described(self, size: int) -> Cuts:
        if size not in self._cuts:
            with self._one_at_a_time:
                self._cuts[size] = describe(self._known, self._config, size)
        return self._cuts[size]

    def _nearest(self, layout: Layout) -> int:
        """Return the largest tensor size below that of `layout` that AutoTP and the ZeRO stage allow; 1 if there is
        none.
        """
        for size in range(layout.tensor - 1, 1, -1):
            try:
                refuse_empty(self._described(size), self._config, layout.replace(tensor=size))
            except _REFUSALS:
                continue
            return size
        return 1


class AutoEPShaper(Conversion, TensorShaper):
    """Shaper of a model whose layers with experts come from AutoEP. AutoTP cuts the other layers."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        listed: bool = False,
        factory: ModelFactory | None = None,
    ) -> None:
        """Take over a user's model: give it DeepSpeed's layers with all experts, which keep the model's values.

        listed: whether the caller has lists of the model's parameters, such as an optimizer's, that must be updated.
        """
        Conversion.__init__(self, model, config)
        self.autoep = self
        self._unconverted = template_of(model, factory)
        TensorShaper.__init__(self, self.dealt(1, 0), config)
        self._replaced = replace_layers(model, self._block, 1, 0, listed)

    def dealt(self, size: int, index: int) -> nn.Module:
        """Return a copy of the user's model, converted by AutoEP for one expert index."""
        made = copied(self._unconverted)
        replace_layers(made, self._block, size, index)
        return made

    def user_tensors(self) -> list[UserTensor]:
        """Return the tensors of the user's model that AutoEP has replaced."""
        return user_tensors(copied(self._unconverted), self._block)

    def cuts(self, layout: Layout) -> Cuts:
        """Return a map from tensor name to cuts: into whole experts for stacks of experts, and AutoTP's for other
        tensors.

        Raises LayoutError if the size does not divide the experts of a layer, if the map of experts does not fit the
        layers, or if DeepSpeed refuses the layout. Also raises the errors of `TensorShaper.cuts`.
        """
        refuse_other_axes(layout, "tensor")
        if layout.tensor > 1:
            try:
                validate(self._config, layout)
            except ValueError as error:
                raise LayoutError(f"{layout}: {error}; choose another tensor or expert size") from error
        cuts, whole = self.expert_cuts(layout), super().cuts(layout.replace(expert=1))
        return {name: replace(whole[name], expert=cut.expert) for name, cut in cuts.items()}

    def make(self, layout: Layout, rank: int) -> Made:
        """Return the children of the template, converted by AutoEP and cut by AutoTP for a rank of a layout."""
        return self.cut(self.dealt(layout.expert, layout.expert_place(rank)[0]), layout, rank)

    def enter(self, engine: Any, layout: Layout) -> None:
        """Give layers the current process groups and this rank's experts, even if the module has not changed."""
        super().enter(engine, layout)
        self.enter_layers(engine, layout)

    def leave(self, engine: Any) -> None:
        """Remove from all layers the process groups of the world that ends."""
        super().leave(engine)
        leave_groups(engine.module)
        engine._autoep_folding_group_handles = None

    def configure(self, config: dict[str, Any], layout: Layout) -> None:
        """Write the layout's sizes into the fields of the configuration from which DeepSpeed reads them."""
        config["expert_parallel"]["autoep_size"] = layout.expert
        super().configure(config, layout)


def _weakly_bound(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a layer's method but keeps only a weak reference to the layer.

    A strong reference would keep the layer's memory until the garbage collector runs.
    """
    reference = WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*arguments)

    return call


def _sum_over_ranks(gradient: torch.Tensor) -> torch.Tensor:
    """Sum a gradient over tensor ranks.

    A hook for parameters that every rank holds whole but uses only in part, such as norms of heads. DeepSpeed's own
    hook always uses the group with which it was made; this one looks up the current group.
    """
    whole = gradient.contiguous()
    dist.all_reduce(whole, group=groups.get_tensor_model_parallel_group())
    return whole


def _speak_over(root: nn.Module, group: td.ProcessGroup | None) -> None:
    """Set the process group over which AutoTP's layers and loss communicate; None removes it."""
    for module in root.modules():
        if isinstance(module, TensorParallel_Layer):
            module.mp_group = group
    loss = getattr(root, "loss_function", None)
    if isinstance(loss, VocabParallelCausalLMLoss):
        loss.tp_group, loss._resolved_vocab_key = group, None
