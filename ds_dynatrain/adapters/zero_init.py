"""`deepspeed.zero.Init` in a launch whose members come and go.

DeepSpeed cuts each parameter, as soon as its module is built, over all processes that there are. Here these are known
only once the job has this process, and a process that joins a running job has nobody to cut with, for the others train.
So whoever calls `zero.Init` first comes into the job by that. Those that start the job cut parameters over all of them,
as in a fixed launch. On one that joins, parameters go to the meta device: nothing is drawn, and what a loader copies
into them is not read; their values come from the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import torch
from deepspeed import zero
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from ds_dynatrain.adapters.meta import swap_in
from ds_dynatrain.adapters.replaced import replaced

ONE_SAMPLE = {"train_micro_batch_size_per_gpu": 1}
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Which DeepSpeed checks against the number of processes, though `zero.Init` has no use for them."""


class ElasticInit(Init):  # type: ignore[misc]
    """`deepspeed.zero.Init`, with the same arguments. `install` makes the class in use, with `join` and `read`."""

    join: Callable[[], bool]
    read: Callable[[Any], dict[str, Any]]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.is_newcomer = type(self).join()
        given = signature(Init.__init__).bind(self, *arguments, **named)
        for name in ("config_dict_or_path", "config"):
            if given.arguments.get(name) is not None:
                own = type(self).read(given.arguments[name])
                kept = {key: value for key, value in own.items() if key not in SIZES}
                given.arguments[name] = kept | ONE_SAMPLE
        self._leaves_undrawn = ExitStack()
        super().__init__(*given.args[1:], **given.kwargs)

    def __enter__(self) -> None:
        super().__enter__()
        if self.is_newcomer and self.enabled:
            self._leaves_undrawn.enter_context(_undrawn())

    def __exit__(self, *raised: Any) -> Any:
        self._leaves_undrawn.close()
        return super().__exit__(*raised)

    def _post_init_method(self, module: nn.Module) -> None:
        if not self.is_newcomer:
            super()._post_init_method(module)
            return
        _drop(module.parameters(recurse=False))
        with replaced(module, "_parameters", {}):  # DeepSpeed sees to buffers
            super()._post_init_method(module)

    def _convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        if self.is_newcomer:
            _drop(param_list)
        else:
            super()._convert_to_zero_parameters(param_list)


def install(join: Callable[[], bool], read: Callable[[Any], dict[str, Any]]) -> None:
    """Put it in the place of `deepspeed.zero.Init`; DeepSpeed's engines have their own.

    join: called before each use, brings this process into the job, and says whether it joins one that runs. read: a
    configuration as a dictionary.
    """
    zero.Init = type("Init", (ElasticInit,), {"join": staticmethod(join), "read": staticmethod(read)})
    warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter", UserWarning)


def _drop(parameters: Iterable[nn.Parameter]) -> None:
    """Onto the meta device; the objects stay."""
    for each in parameters:
        if not each.is_meta:
            swap_in(each, each.data.to("meta"))


@contextmanager
def _undrawn() -> Iterator[None]:
    """Inside the block functions of `torch.nn.init` leave parameters as they are; one that is kept works later."""
    is_open = True

    def instead_of(fill: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fill)
        def leave(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            return tensor if is_open and isinstance(tensor, nn.Parameter) else fill(tensor, *arguments, **named)

        return leave

    with ExitStack() as stack:
        for name, fill in list(vars(nn.init).items()):
            if name.endswith("_") and not name.startswith("_"):
                stack.enter_context(replaced(nn.init, name, instead_of(fill)))
        yield
    is_open = False
