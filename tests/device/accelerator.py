"""DeepSpeed on the device: its accelerator class, and `use`, which puts it in place of the one that DeepSpeed found.

It is not a synchronised device, so DeepSpeed takes the branches that it takes on a card: streams, events, prefetch. Of
DeepSpeed's compiled operators there are those that compute on the host; a configuration says `torch_adam`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.ops.adam import fused_adam
from torch.utils.cpp_extension import BuildExtension

from tests.device import lab

HOST_BUILDERS = ("CPUAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder", "AsyncIOBuilder")


def use() -> None:
    """Make this process one that computes on the device: what torch and DeepSpeed are asked for goes there."""
    lab.load()
    set_accelerator(LabAccelerator())
    fused_adam.FusedAdamBuilder = get_accelerator().get_op_builder("FusedAdamBuilder")  # taken at its import


def share() -> None:
    """Let the workers of a node compute on the one device, whatever their local ranks."""
    LabAccelerator.device_name = lambda self, index=None: lab.NAME if index is None else f"{lab.NAME}:0"  # type: ignore[method-assign]
    LabAccelerator.set_device = lambda self, index: None  # type: ignore[method-assign]


class LabAccelerator(DeepSpeedAccelerator):
    """What DeepSpeed asks a device."""

    def __init__(self) -> None:
        super().__init__()
        self._name = lab.NAME
        self._communication_backend_name = lab.BACKEND
        self._compile_backend = "inductor"

    # ---- what it is

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return False

    def resolves_data_dependency(self) -> bool:
        return False

    def handles_memory_backpressure(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return lab.NAME if device_index is None else f"{lab.NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(lab.NAME, device_index or 0)

    def set_device(self, device_index: int) -> None:
        lab.set_device(device_index)

    def current_device(self) -> int:
        return lab.current_device()

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        return lab.device_count()

    def is_available(self) -> bool:
        return lab.is_available()

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == lab.NAME

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def is_triton_supported(self) -> bool:
        return False

    # ---- random numbers

    def random(self) -> Any:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        lab.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return lab.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        lab.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        lab.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return lab.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return lab.default_generator()

    # ---- order

    @property
    def Stream(self) -> Any:  # noqa: N802
        return lab.Stream

    @property
    def Event(self) -> Any:  # noqa: N802
        return lab.Event

    def stream(self, stream: Any) -> Any:
        return lab.stream(stream)

    def current_stream(self, device_index: int | None = None) -> torch.Stream:
        return lab.current_stream()

    def default_stream(self, device_index: int | None = None) -> torch.Stream:
        return lab.default_stream()

    def synchronize(self, device_index: int | None = None) -> None:
        lab.synchronize()

    # ---- memory

    def empty_cache(self) -> None:
        lab.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return lab.memory_allocated()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return lab.max_memory_allocated()

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        lab.reset_peak_memory_stats()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        lab.reset_peak_memory_stats()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return lab.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return lab.max_memory_allocated()

    memory_cached = memory_reserved
    max_memory_cached = max_memory_reserved
    reset_max_memory_cached = reset_max_memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return lab.memory_stats()

    def total_memory(self, device_index: int | None = None) -> int:
        return lab.mem_get_info()[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return lab.mem_get_info()[0]

    # ---- tensors

    @property
    def BFloat16Tensor(self) -> Any:  # noqa: N802
        return self._tensors(torch.bfloat16)

    @property
    def ByteTensor(self) -> Any:  # noqa: N802
        return self._tensors(torch.uint8)

    @property
    def DoubleTensor(self) -> Any:  # noqa: N802
        return self._tensors(torch.double)

    @property
    def FloatTensor(self) -> Any:  # noqa: N802
        return self._tensors(torch.float)

    @property
    def HalfTensor(self) -> Any:  # noqa: N802
        return self._tensors(torch.half)

    @property
    def IntTensor(self) -> Any:  # noqa: N802
        return self._tensors(torch.int)

    @property
    def LongTensor(self) -> Any:  # noqa: N802
        return self._tensors(torch.long)

    @staticmethod
    def _tensors(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        return partial(torch.tensor, dtype=dtype, device=lab.NAME)

    # ---- operators

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder.cpu"

    def get_op_builder(self, class_name: str) -> Any:
        builders = importlib.import_module(self.op_builder_dir())
        return getattr(builders, class_name if class_name in HOST_BUILDERS else "NotImplementedBuilder")

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def build_extension(self) -> Any:
        return BuildExtension

    # ---- what it does not have

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """It has no profiler."""

    def range_pop(self, domain: Any = None) -> None:
        """It has no profiler."""

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        callback()

    def create_graph(self) -> None:
        """It has no graphs."""

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        raise NotImplementedError(f"{lab.NAME} has no graphs")

    def replay_graph(self, graph: Any) -> None:
        raise NotImplementedError(f"{lab.NAME} has no graphs")

    def export_envs(self) -> list[str]:
        return []

    def visible_devices_envs(self) -> list[str]:
        return []

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """There is one device."""

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend
