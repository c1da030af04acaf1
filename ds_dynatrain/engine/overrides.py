"""DeepSpeed's calls that do more than DeepSpeed's: in a world that may be aborted meanwhile, in the engine's turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch

from ds_dynatrain.adapters.host_engine import COMPILE_BACKEND, NOTHING, HostEngine
from ds_dynatrain.adapters.module_state import buffers_kept, note
from ds_dynatrain.adapters.shaper import Shaper
from ds_dynatrain.adapters.world import World
from ds_dynatrain.data import Cursor
from ds_dynatrain.engine.checkpoints.from_checkpoint import Part
from ds_dynatrain.engine.context import Context, Job
from ds_dynatrain.engine.members.discarded import needs_peers, plain
from ds_dynatrain.engine.parts import EngineParts
from ds_dynatrain.engine.process import PROCESS
from ds_dynatrain.errors import ConfigError, DataError
from ds_dynatrain.extension import around
from ds_dynatrain.report import logger
from ds_dynatrain.space import Layout
from ds_dynatrain.support import usage

Call = TypeVar("Call", bound=Callable[..., Any])


def in_turn(call: Call) -> Call:
    """Decorates a call of an engine: where a process has several, it is made in the engine's turn."""

    @wraps(call)
    def in_its_turn(engine: OverridingEngine, *arguments: Any, **named: Any) -> Any:
        with engine.turn():
            return call(engine, *arguments, **named)

    in_its_turn.__doc__ = call.__doc__ or "DeepSpeed's."
    return cast("Call", in_its_turn)


class OverridingEngine(HostEngine):
    """DeepSpeed's engine with `EngineParts`, which hang on `_parts`."""

    _parts: EngineParts

    def __init__(
        self,
        *,
        job: Job,
        context: Context,
        layout: Layout,
        members: tuple[int, ...],
        world: World | None,
        shaper: Shaper,
        whole: bool = True,
        **arguments: Any,
    ) -> None:
        """world: this member's process groups, which are installed; None on an idle member. arguments: of DeepSpeed's
        constructor, which calls methods that ask the parts."""
        sizes = int(job.batch_sizes.train_batch_size), world is not None
        host = self._host = self._HOST(self, layout, shaper, *sizes, whole, in_leaves=job.batch_sizes.in_leaves)
        self._parts = EngineParts(host, job, context, layout, members, world)
        for extension in job.extensions:
            extension.attach(self)
        super().__init__(**arguments)

    def turn(self) -> AbstractContextManager[None]:
        """A block in which `torch.distributed`, DeepSpeed and the random generators are this engine's.

        They are in all of its calls. Code of your own needs it only where a process has several engines, and there
        only to ask `torch.distributed` about this engine's world, or to draw from its random streams.
        """
        return PROCESS.turn(self._parts)

    # ---- DeepSpeed's forward, backward and step, in a world that may be aborted meanwhile ----------------------------

    @in_turn
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DeepSpeed's; a micro-batch without a sample of its own leaves no trace in the module's buffers.

        Where members come and go: if the world is aborted in it, it is formed anew; what is returned trains nothing.
        """
        parts, window = self._parts, self._parts.window
        run = partial(self._forward, *inputs, **kwargs)
        parts.control.raise_if_lost()
        if parts.is_discarded:
            return window.forward_again(run, needed_peers=False)
        needed_peers = needs_peers(parts.layout)
        if needed_peers and not parts.is_in_epoch and PROCESS.sync_points.arrive("a forward pass") is None:
            raise DataError(
                f"member {parts.control.member} came late; in {parts.layout} a forward pass needs the others, who are "
                "elsewhere in their scripts: loop over engine.epochs(n), which counts the job's epochs, or evaluate "
                "with engine.loader(..., evaluation=True), which has no batch here"
            )
        output = PROCESS.membership.surviving(parts, run, lambda: window.forward_again(run, needed_peers))
        return output if parts.is_discarded else PROCESS.membership.returned(parts, output)

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's forward pass between the hooks of the extensions."""
        parts, module = self._parts, self.module
        note(module)
        leaves_no_trace = self._host.slot_is_borrowed and any(part.training for part in module.modules())
        kept = buffers_kept(module) if leaves_no_trace else nullcontext()
        with kept, around(each.around_forward() for each in parts.extensions):
            output = super().forward(*inputs, **kwargs)
        for extension in parts.extensions:
            extension.after_forward(output)
        return output

    @in_turn
    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *, tokens: int | None = None
    ) -> torch.Tensor:
        """DeepSpeed's; see `HostEngine.backward`. In a global batch that is discarded it does nothing."""
        if self._parts.is_discarded:
            return loss
        loss, run, parts = plain(loss), super().backward, self._parts

        def backward() -> torch.Tensor:
            with around(each.around_backward() for each in parts.extensions):
                made: torch.Tensor = run(loss, retain_graph, scale_wrt_gas, tokens=tokens)
            for extension in parts.extensions:
                extension.after_backward(loss)
            return made

        return PROCESS.membership.surviving(parts, backward, lambda: loss)

    def _backward_prologue(self) -> None:
        """DeepSpeed's, where any backward pass begins, also one of `loss.backward()`."""
        with PROCESS.backward(self._parts):
            super()._backward_prologue()

    @in_turn
    def step(self, lr_kwargs: Any = None) -> None:
        """DeepSpeed's; a complete window opens the way to the next boundary.

        UnsupportedError for a step that the user places (by `set_gradient_accumulation_boundary(True)`, or without
        `managed_gradient_accumulation`) in the middle of a global batch: in another world that would be another set
        of samples. In a global batch that is discarded it does nothing.
        """
        if not self._parts.is_discarded:
            PROCESS.membership.surviving(self._parts, lambda: self._step(lr_kwargs), lambda: None)

    def _step(self, lr_kwargs: Any) -> None:
        parts, steps, samples = self._parts, self._parts.accumulation, int(self.global_samples)
        by_hand = self._host.ends_window_by_hand
        if by_hand and parts.open_batch.is_dealt and not parts.open_batch.is_last:
            raise usage("set_gradient_accumulation_boundary").error(
                f"a boundary set by hand in the middle of a global batch of {steps} micro-batches"
            )
        is_last, place = by_hand or self.is_gradient_accumulation_boundary(), parts.attempts.entered_at
        if is_last and not parts.attempts.settle():  # late kinds are not all there
            logger.warning(
                "this global batch is void: it trains nothing, and the world before the switch deals it again"
            )
            if parts.idle:  # who did not work in the old world waits here until it does
                parts.switcher.at_boundary(place)
            return
        super().step(lr_kwargs)
        if by_hand:  # one call for all of the window's micro-batches
            self.micro_steps += -self.micro_steps % steps
        if self.micro_steps % steps == 0:
            self._end_window(samples)
        parts.finish_step()

    def _take_model_step(self, *arguments: Any) -> None:
        """DeepSpeed's; from its begin to its end the state is neither that before it nor that after it."""
        parts = self._parts
        parts.agree()
        parts.is_stepping = True
        with around(each.around_update() for each in parts.extensions):
            super()._take_model_step(*arguments)
        parts.is_stepping = False
        if parts.world is not None and parts.world.status is not None:
            parts.world.status.gate.end_step()

    def _end_window(self, samples: int) -> None:
        """After the optimizer's step; samples: `global_samples` before it."""
        parts = self._parts
        parts.attempts.note_first_step()
        parts.switcher.note_step()
        if parts.open_batch.samples is not None:
            self.global_samples = samples + parts.open_batch.samples
        for extension in parts.extensions:
            extension.after_batch()
        parts.forget_batch()

    @in_turn
    def compile(
        self,
        backend: Any = COMPILE_BACKEND,
        compile_kwargs: Mapping[str, Any] | None = NOTHING,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """DeepSpeed's, with `torch.compile`; call it on every process, idle ones too. Each switch compiles anew.

        UnsupportedError for a schedule of DeepCompile and for compiled autograd.
        """
        if schedule is not None:
            raise usage("DeepCompile").error("engine.compile(schedule=...)")
        if compiled_autograd_enabled:
            raise usage("compiled autograd").error("engine.compile(compiled_autograd_enabled=True)")
        super().compile(COMPILE_BACKEND if backend is None else backend, dict(compile_kwargs or {}))

    # ---- what there is of DeepSpeed's besides ------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """UnsupportedError: the loaders' epochs are cut by the batch size of the start."""
        raise usage("set_train_batch_size").error(f"set_train_batch_size({train_batch_size})")

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """UnsupportedError: the micro-batch follows from the global batch and the world."""
        raise usage("set_train_micro_batch_size").error(f"set_train_micro_batch_size({micro_batch_size})")

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: dict[str, Callable[[int], Any]]) -> None:
        """DeepSpeed's; call it on every process before the first batch, or the ConfigError says that it is too late."""
        for loader in self._parts.loaders.of_curricula:
            if loader.cursor > Cursor() or loader.mid_window:
                raise ConfigError(
                    f"set_custom_curriculum_learning_schedule: loader {loader.name!r} has dealt batches by another "
                    "schedule; call it before the first batch, on every process"
                )
            loader.order.set_schedule(schedule_func_dict)  # type: ignore[attr-defined]

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """DeepSpeed's: with a curriculum, `function(batch, state of the sampler)` gives the batch to train on."""
        for loader in self._parts.loaders.of_curricula:
            loader.post_process = post_process_func

    @in_turn
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] = NOTHING,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """DeepSpeed's; False, with a warning, if the world is aborted in it, or was in this global batch.

        On a member that came late it saves under the folder and tag that the others have said.
        """
        save = partial(
            super().save_checkpoint,
            client_state=dict(client_state),
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        return self._parts.checkpoints.save_stock(save, save_dir, tag)

    @in_turn
    def load_checkpoint(
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        *,
        trust_pickle: bool = False,
    ) -> Any:
        """DeepSpeed's; and it loads what was saved in another layout, and checkpoints of `engine.save`.

        That is one step for all members, as `engine.load`, which see also for `trust_pickle`; CheckpointError says
        why it cannot be. In the layout that was saved, and cut by the same options, or with only weights asked for, it
        is DeepSpeed's.
        With `load_module_strict=False` frozen weights that it was saved without stay as they are.

        On a member that joins a running job, before its first batch there, it loads nothing and returns what the job's
        own call returned, with those parts of the client state that JSON can hold.
        """
        part = Part(
            load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        )
        return self._parts.checkpoints.load_stock(super().load_checkpoint, load_dir, tag, trust_pickle, part)

    save_16bit_model = in_turn(HostEngine.save_16bit_model)
    module_state_dict = in_turn(HostEngine.module_state_dict)
    offload_states = in_turn(HostEngine.offload_states)
    reload_states = in_turn(HostEngine.reload_states)

    def destroy(self) -> None:
        """DeepSpeed's, and the end of this engine's job: members that wait for work in it are let go."""
        if "_parts" not in self.__dict__:
            return
        with self.turn():
            self._parts.end_job()
            super().destroy()
            if hasattr(self._host, "model_map"):  # else it could not be built
                self._host.let_module_go()
        PROCESS.leave(self._parts)
