"""DeepSpeed's engine with the few changes that a live switch needs. This file overrides its private methods."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import configure_moe_param_groups
from deepspeed.runtime.data_pipeline.constants import RANDOM_LTD_GLOBAL_BATCH_SIZE, RANDOM_LTD_MICRO_BATCH_SIZE
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_dynatrain.adapters.deepspeed.host import Host
from ds_dynatrain.adapters.model.moe import all_counted, ask_for_present_groups, refuse_mixed_groups
from ds_dynatrain.adapters.model.moe import clip as clip_with_experts
from ds_dynatrain.adapters.versions.deepspeed_versions import refuse_groups, refuse_optimizer, settle_flat_groups
from ds_dynatrain.adapters.versions.replaced import replaced
from ds_dynatrain.adapters.zero import loss_scale as scaler
from ds_dynatrain.adapters.zero.optimizers import check_optimizer
from ds_dynatrain.adapters.zero.stages import link_fragments, reset_counters
from ds_dynatrain.errors import DataError
from ds_dynatrain.support import usage

COMPILE_BACKEND: str = get_accelerator().get_compile_backend()
NOTHING: Mapping[str, Any] = MappingProxyType({})
"""The empty mapping that is the default argument in the signatures of DeepSpeed's methods."""


class HostEngine(DeepSpeedEngine):  # type: ignore[misc]
    """A DeepSpeed engine whose `Host` can detach its optimizer and attach one for another layout."""

    _HOST: ClassVar[type[Host]] = Host
    optimizer: Any
    _host: Host
    """State kept alongside the engine; set before DeepSpeed's constructor runs."""

    # ---- building ------------------------------------------------------------------------------------------------

    def _configure_expert_parallel(self, model: nn.Module, *more: Any, **named: Any) -> Any:
        """Configure experts the way DeepSpeed does.

        With AutoEP, only return the record of which parameters replaced which, because the shaper has already replaced
        the layers that have experts.
        """
        if self._host.shaper.autoep:
            return self._host.shaper.autoep.take_replaced()
        return super()._configure_expert_parallel(model, *more, **named)

    def _configure_distributed_model(self, model: nn.Module) -> None:
        """Configure the model the way DeepSpeed does, after making layers with experts use the existing groups."""
        ask_for_present_groups(model)
        super()._configure_distributed_model(model)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Record the user's optimizer groups before ZeRO replaces them. On an idle member, build no ZeRO optimizer."""
        self._host.is_own_optimizer = client_optimizer is None
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
        check_optimizer(basic, self.config, self._host.layout)
        self._host.look(basic)
        if self._host.model_map.dtype != self.get_data_types()[0]:
            raise usage("element types").error(f"a parameter is {self._host.model_map.dtype}")
        refuse_groups(self._host.model_map.groups)
        if self._host.attaches and self._host.whole:
            reset_counters()
            self._configure_zero(basic)
            settle_flat_groups(self.optimizer)
            if getattr(self.optimizer, "round_robin_gradients", False):
                link_fragments(self.optimizer)
        else:
            self.basic_optimizer = self.optimizer = basic

    def _broadcast_model(self) -> None:
        """Broadcast the model the way DeepSpeed does. Does nothing if parameters get their values later."""
        if self._host.whole:
            super()._broadcast_model()

    def zero_force_ds_cpu_optimizer(self) -> bool:
        """Return whether an offloaded optimizer must be of DeepSpeed's own class.

        Returns False for an optimizer that we build from the configuration, which is treated like a user's optimizer.
        """
        return not self._host.is_own_optimizer and bool(super().zero_force_ds_cpu_optimizer())

    def _configure_random_ltd_scheduler(self, configs: dict[str, Any]) -> Any:
        """Make DeepSpeed's random-LTD scheduler, which counts the tokens of a global batch."""
        return super()._configure_random_ltd_scheduler(
            {**configs, RANDOM_LTD_GLOBAL_BATCH_SIZE: self._host.global_batch_size}
        )

    def random_ltd_config(self) -> dict[str, Any]:
        """Return DeepSpeed's block for random-LTD, with two batch sizes that its constructor adds only once."""
        block: dict[str, Any] = super().random_ltd_config()
        block.setdefault(RANDOM_LTD_GLOBAL_BATCH_SIZE, self.train_batch_size())
        block.setdefault(RANDOM_LTD_MICRO_BATCH_SIZE, self.train_micro_batch_size_per_gpu())
        return block

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        *more: Any,
        **named: Any,
    ) -> Any:
        """Load a checkpoint the way DeepSpeed does. At stage 0, also refresh the masters if no optimizer states are
        loaded.

        DeepSpeed itself refreshes them only in its other stages. At stage 0 it would keep the old masters, and the next
        step would overwrite the loaded weights with them.
        """
        found = super().load_checkpoint(load_dir, tag, load_module_strict, load_optimizer_states, *more, **named)
        has_masters = not self.zero_optimization() and hasattr(self.optimizer, "refresh_fp32_params")
        if found[0] is not None and not load_optimizer_states and has_masters:
            self.optimizer.refresh_fp32_params()
        return found

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *, tokens: int | None = None
    ) -> torch.Tensor:
        """Run DeepSpeed's `backward`, with the loss weighted by the number of samples that the loader assigned here.

        tokens: the number of tokens over which `loss` is the mean. The window's gradient is then the mean over all
            tokens of the window, in every world. Give `tokens` for every micro-batch of a window, or for none.

        Raises DataError if `tokens` is given for a loss that is already divided.
        """
        if tokens is not None and self._host.loss_is_divided:
            raise DataError(
                f"engine.backward(tokens={tokens}) in a micro_batch(..., is_divided=True): a loss is divided by the "
                "tokens of the global batch once; leave one of the two out"
            )
        if tokens is not None:
            count = 0 if self._host.slot_is_borrowed else int(tokens)
            self._host.window_tokens = (self._host.window_tokens or 0) + count
            self._host.slot_weight = float(count)
        weight = self._host.loss_weight
        self._host.is_weighted = True  # the loss is weighted, so do not weight its gradients again
        forgotten = scaler.forgotten_scale(self)
        try:
            weighted = loss if weight == 1.0 else loss * weight
            if forgotten != 1.0:
                weighted = weighted.float() * forgotten
            scaled: torch.Tensor = super().backward(weighted, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
            return scaled if forgotten == 1.0 else scaled / forgotten
        finally:
            self._host.is_weighted = False
            self._host.slot_weight = self._host.slot_weight if tokens is None else 1.0

    def _backward_prologue_per_tensor(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Weight the gradient of a plain `loss.backward()`, which bypasses the engine's `backward`."""
        scaled: torch.Tensor | None = super()._backward_prologue_per_tensor(grad)
        if scaled is None or scaled is grad or self._host.is_weighted or self._host.loss_weight == 1.0:
            return scaled
        return scaled * self._host.loss_weight

    def clip_fp32_gradients(self) -> None:
        """Clip gradients at ZeRO stage 0. With several expert ranks, the norm is computed by this package.

        DeepSpeed's own norm depends on the expert size.
        """
        if self._host.shape.expert > 1:
            clip_with_experts(self.module, self.gradient_clipping(), self._host.layout)
        else:
            super().clip_fp32_gradients()

    def _take_model_step(self, *arguments: Any) -> None:
        """Take DeepSpeed's optimizer step.

        If losses were weighted by token counts, first divide the accumulated gradients by the number of tokens.
        """
        counted = all_counted(self.module, self._host.layout)
        with scaler.divided_by_tokens(self, self._host.window_tokens, self._token_slots), self._norm_said(), counted:
            super()._take_model_step(*arguments)
        self._host.end_step()

    @property
    def _token_slots(self) -> int:
        """Number by which DeepSpeed has already divided gradients that are weighted by token counts."""
        return int(self.dp_world_size * self.gradient_accumulation_steps())

    def _norm_said(self) -> AbstractContextManager[None]:
        """Return a context manager in which the optimizer's step reports the norm of the unscaled gradients."""
        return scaler.true_norm(self)

    def _configure_zero(self, basic: torch.optim.Optimizer) -> None:
        """Build DeepSpeed's ZeRO optimizer around the basic optimizer, whose parameters are already recorded.

        If experts exist but none is trained any longer, build the optimizer as for a model without experts, because
        DeepSpeed would require an optimizer group of experts.
        """
        trained = any(group.get("moe") for group in basic.param_groups)
        with replaced(self, has_moe_layers=self.has_moe_layers and trained):
            super()._configure_optimizer(basic, None)
        self._host.optimizer_made()
