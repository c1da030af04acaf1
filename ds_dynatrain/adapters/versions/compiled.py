"""torch.compile around a switch: find compiled modules, time their compilation, and drop compiled code.

Compiled code is valid only as long as certain hooks, containers and buffers are unchanged, and a switch replaces them.
Dynamo would compile again for each new layout and, after `recompile_limit` (8) versions of one function, run it eagerly
for the rest of the job without an error. All compiled code is therefore dropped after a switch, and the next call
compiles only for the current layout.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._dynamo.callback import callback_handler


class CompileWatch:
    """Counter and timer of dynamo's compilations in this process, by any caller, until `stop`.

    count: the number of compilations since the watch was made.
    seconds: the time that compilations have taken since `begin`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._begin = 0.0
        for callbacks, mine in self._lists():
            callbacks.append(mine)

    def begin(self, is_anew: bool) -> None:
        """Reset `seconds` to 0.

        is_anew: whether the optimizer was replaced, so that compiled code is dropped first. The time to compile again
            is then counted.
        """
        self.seconds = 0.0
        if is_anew and self.count:
            self.forget()

    def forget(self) -> None:
        """Drop all code that dynamo has compiled in this process. Compiled modules compile again when called.

        The duration of this call is added to `seconds`. Callbacks registered by other code stay registered.
        """
        begin = time.perf_counter()
        others = list(callback_handler.start_callbacks), list(callback_handler.end_callbacks)
        torch._dynamo.reset()
        graphs = sys.modules.get("torch._inductor.cudagraph_trees")
        if graphs is not None:  # graphs of mode="reduce-overhead" read replaced memory
            graphs.reset_cudagraph_trees()
        callback_handler.start_callbacks[:], callback_handler.end_callbacks[:] = others
        self.seconds += time.perf_counter() - begin

    def stop(self) -> None:
        """Remove the callbacks. A second call does nothing."""
        for callbacks, mine in self._lists():
            if mine in callbacks:
                callbacks.remove(mine)

    def _lists(self) -> list[tuple[list[Any], Any]]:
        return [(callback_handler.start_callbacks, self._started), (callback_handler.end_callbacks, self._ended)]

    def _started(self, _: Any) -> None:
        self._begin = time.perf_counter()

    def _ended(self, _: Any) -> None:
        self.count += 1
        self.seconds += time.perf_counter() - self._begin


def compiled_in_place(module: nn.Module) -> list[str]:
    """Return the names of the modules on which `compile()` was called, by `engine.compile` or by the user."""
    return [name or "the model" for name, part in module.named_modules() if part._compiled_call_impl is not None]


def compiled_by_wrapping(module: nn.Module) -> list[str]:
    """Return the names of the modules that `torch.compile(module)` has wrapped."""
    wrapper = torch._dynamo.eval_frame.OptimizedModule
    return [name or "the model" for name, part in module.named_modules() if isinstance(part, wrapper)]


def compile_layers(module: Any, given: Mapping[str, Any]) -> None:
    """Compile, the way DeepSpeed does, the layers and functions of a pipeline stage that are not compiled yet.

    given: arguments of `torch.compile`.
    """
    for number, layer in enumerate(module.forward_funcs):
        if not isinstance(layer, nn.Module):
            if not hasattr(layer, "_torchdynamo_orig_callable"):
                module.forward_funcs[number] = torch.compile(layer, **given)
        elif layer._compiled_call_impl is None:
            layer.compile(**given)
