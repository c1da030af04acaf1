"""Actuators, which set the clock of a device: the base class, and those of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.extension import named


class Actuator:
    """Base class of actuators. A process makes one for its device, and its watcher makes another one.

    device: the number of the device among those that the process sees.
    """

    clocks: Sequence[int]
    """The supported clocks, lowest first; the same on all members."""
    unit: ClassVar[str] = "MHz"
    is_dry: ClassVar[bool] = False
    """Whether `set` sets nothing."""

    def __init__(self, device: int) -> None:
        self.device = device

    def set(self, clock: int) -> None:
        """Let the device run at no more than this clock, which is one of `clocks`."""

    def give_back(self) -> None:
        """Let the device choose its clock again. Does nothing if no clock is set."""


class Dry(Actuator):
    """An actuator that sets nothing: clocks are percent of the highest one."""

    clocks = range(10, 101)
    unit = "%"
    is_dry = True


class Zeus(Actuator):
    """The actuator on the library `zeus`, for NVIDIA's and AMD's cards. Raises ConfigError if it cannot be used."""

    def __init__(self, device: int) -> None:
        super().__init__(device)
        try:
            from zeus.device import get_gpus
        except ImportError as error:
            raise ConfigError(
                f'dynatrain.clocks.actuator: "zeus" needs that library ({error}); pip install "ds-dynatrain[clocks]"'
            ) from error
        try:
            self._gpus = get_gpus()
            memory = max(self._gpus.get_supported_memory_clocks(device))
            self.clocks = sorted(set(self._gpus.get_supported_graphics_clocks(device, memory)))
        except Exception as error:  # those of zeus, NVML and AMD SMI have no class in common
            raise ConfigError(
                f'dynatrain.clocks.actuator: "zeus" finds no clocks of device {device} ({error}); set '
                'CUDA_VISIBLE_DEVICES to numbers of whole cards, or take "dry"'
            ) from error

    def set(self, clock: int) -> None:
        """Set the highest clock that the card may choose."""
        self._gpus.set_gpu_locked_clocks(self.device, self.clocks[0], clock)

    def give_back(self) -> None:
        """Unlock the card's clock."""
        self._gpus.reset_gpu_locked_clocks(self.device)


def made(name: str, device: int) -> Actuator:
    """Return the actuator of this name for a device. Raises ConfigError if there is none."""
    kinds: dict[str, type[Actuator]] = {"dry": Dry, "zeus": Zeus}
    try:
        return kinds[name](device) if name in kinds else named(name)(device)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'dynatrain.clocks.actuator: "{name}" cannot be imported ({error}); give "module:Class" of a class derived '
            "from ds_dynatrain.clocks.actuator.Actuator"
        ) from error
