"""The tensor axis: a root module takes on AutoTP's layers of any size, and the engine what belongs to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

import deepspeed.comm as dist
import torch
import torch.distributed as td
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.module_inject import set_autotp_mode
from deepspeed.module_inject.layers import TensorParallel_Layer, configure_tensor_parallel_runtime
from deepspeed.sequence.cross_entropy import VocabParallelCausalLMLoss
from deepspeed.utils import groups
from torch import nn

from ds_dynatrain.adapters.autotp import Cuts, describe, partition, refuse_empty, refuse_model, settings
from ds_dynatrain.adapters.children import Made, adopt, with_memory
from ds_dynatrain.adapters.shaper import Shaper
from ds_dynatrain.adapters.template import ModelFactory, Template
from ds_dynatrain.errors import LayoutError, UnsupportedError
from ds_dynatrain.space import WHOLE, AxisCuts, Layout

_PARSED = "ds_autotp_parsed"
_LOSS_BEFORE = "_deepspeed_original_loss_function"
_PARTIAL = "_ds_grad_allreduce_registered"
"""On parameters whose gradients AutoTP adds up over the ranks."""
_METHODS = {"gather_params", "_tp_partition"}
"""Of a layer, on its parameters."""

_REFUSALS = (AssertionError, ValueError, NotImplementedError, RuntimeError, UnsupportedError, LayoutError)
"""How AutoTP, and the checks of what it says, say no."""


class TensorShaper(Shaper):
    """A model that AutoTP deals out, if it is one that AutoTP can."""

    def __init__(self, template: Template | None, config: Mapping[str, Any], reason: str = "") -> None:
        """template: None, for the `reason`, of a model that has none."""
        self._template, self._config, self._reason = template, config, reason
        self._cuts: dict[int, Cuts] = {}
        self._one_at_a_time = threading.Lock()

    @staticmethod
    def of(model: nn.Module, config: Mapping[str, Any], factory: ModelFactory | None = None) -> TensorShaper:
        """The shaper of a user's model that DeepSpeed has not altered."""
        try:
            return TensorShaper(Template.of(model, factory), config)
        except UnsupportedError as error:
            return TensorShaper(None, config, str(error))

    def cuts(self, layout: Layout) -> Mapping[str, AxisCuts]:
        """How the tensor axis cuts each logical tensor. For any layout, whatever world is installed.

        UnsupportedError, naming the parameter or the model, for what AutoTP does not cut, or not in a way that it
        describes; LayoutError, with the nearest size, for a size that it cannot do.
        """
        if layout.pipe * layout.expert > 1:
            raise LayoutError(f"{layout}: this model has no pipeline stages and no experts; leave pipe and expert at 1")
        template, size = self._known, layout.tensor
        if size == 1:
            return dict.fromkeys((name for name, _ in template.module.named_parameters()), WHOLE)
        refuse_model(template.module)
        try:
            found = self._described(size)
            refuse_empty(found, self._config, layout)
        except _REFUSALS as error:
            nearest = self._nearest(layout)
            if nearest == 1 and not isinstance(error, LayoutError):
                raise UnsupportedError(
                    f"tensor={size}: AutoTP cannot cut {type(template.module).__name__}: {error}; or leave "
                    "layout.tensor at 1"
                ) from error
            raise LayoutError(f"tensor={size}: {error}; nearest: tensor={nearest}") from error
        return found

    def make(self, layout: Layout, rank: int) -> Made:
        """The template's children, cut by AutoTP."""
        return self.cut(self._known.copy(), layout, rank)

    def cut(self, module: nn.Module, layout: Layout, rank: int) -> Made:
        """Children out of `module`, a copy of the template, as a rank of `layout` has them."""
        before = dict(module.__dict__)
        if layout.tensor > 1:
            with self._one_at_a_time:
                partition(module, self._config, layout.tensor, layout.coordinate(rank)["tensor"])
        after = module.__dict__.items()
        return Made(module, {name: value for name, value in after if before.get(name, before) is not value})

    def reshape(self, root: nn.Module, layout: Layout, made: Made | None = None) -> None:
        """Give `root` the children of this rank; what AutoTP sets on a root is set on it, or gone."""
        made = made or self.make(layout, td.get_rank())
        with_memory(made.module, next(root.parameters()).dtype)
        for held in made.module.parameters():
            for name in _METHODS & held.__dict__.keys():
                setattr(held, name, _loosely(getattr(held, name)))
            if getattr(held, _PARTIAL, False):
                held.register_hook(_sum_over_ranks)
        _take_off(root, self._known.module)
        adopt(root, made.module)
        root.__dict__.update(made.on_root)
        if layout.tensor > 1:
            _speak_over(root, groups.get_tensor_model_parallel_group())

    def enter(self, engine: Any, layout: Layout) -> None:
        """Set what DeepSpeed's constructor sets: the modes of its layers, their group, and a check of the first batch.

        DeepSpeed compares that batch between the ranks of the axis, and takes the hook off itself.
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
        """Take the check of the first batch off, and let layers forget their group."""
        check = engine.__dict__.pop("first_dataloader_check", None)
        if check is not None:
            check.remove()
        _speak_over(engine.module, None)

    def configure(self, config: dict[str, Any], layout: Layout) -> None:
        """Write the tensor size of a layout into the configuration; what else the user says of AutoTP stays."""
        if layout.tensor > 1 or config.get("tensor_parallel"):
            config["tensor_parallel"] = settings(config, layout.tensor)

    @property
    def _known(self) -> Template:
        if self._template is None:
            raise UnsupportedError(self._reason)
        return self._template

    def _described(self, size: int) -> Cuts:
        if size not in self._cuts:
            with self._one_at_a_time:
                self._cuts[size] = describe(self._known, self._config, size)
        return self._cuts[size]

    def _nearest(self, layout: Layout) -> int:
        """The largest tensor size below that of `layout` that works with its stage; 1 if there is none."""
        for size in range(layout.tensor - 1, 1, -1):
            try:
                refuse_empty(self._described(size), self._config, layout.replace(tensor=size))
            except _REFUSALS:
                continue
            return size
        return 1


def _loosely(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, without a hold on its layer: else the layer's memory would wait for the collector when it is gone."""
    reference = WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*arguments)

    return call


def _sum_over_ranks(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter that all ranks have, and of which each uses a part (norms of single heads).

    DeepSpeed's hook, but for the group, which DeepSpeed's keeps for ever.
    """
    whole = gradient.contiguous()
    dist.all_reduce(whole, group=groups.get_tensor_model_parallel_group())
    return whole


def _speak_over(root: nn.Module, group: td.ProcessGroup | None) -> None:
    """Let all layers of AutoTP, and its loss, speak over a group."""
    for module in root.modules():
        if isinstance(module, TensorParallel_Layer):
            module.mp_group = group
    loss = getattr(root, "loss_function", None)
    if isinstance(loss, VocabParallelCausalLMLoss):
        loss.tp_group, loss._resolved_vocab_key = group, None


def _take_off(root: nn.Module, origin: nn.Module) -> None:
    """Take off the root what AutoTP has set on it. origin: the root as the user made it."""
    loss = root.__dict__.pop(_LOSS_BEFORE, None)
    if loss is not None:
        root.loss_function = loss
    for name in (_PARSED, UNIVERSAL_CHECKPOINT_INFO):
        root.__dict__.pop(name, None)
        if name in origin.__dict__:
            root.__dict__[name] = origin.__dict__[name]
