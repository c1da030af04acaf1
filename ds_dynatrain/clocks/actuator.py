"""Actuators, which set the clock of a device: the base class, and those of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ds_dynatrain.errors import ConfigError
from ds_dynatrain.extension import named


class Actuator:
    """Base class of actuators, which set the clock of a device. A process and its watcher each make one for the device.

    device: the number of the device among those that the process sees.
    """

    clocks: Sequence[int]
    """The supported clocks, lowest first; the same on all members."""
    unit: ClassVar[str] = "MHz"
    is_dry: ClassVar[bool] = False
    """Whether `set` has no effect."""

    def __init__(self, device: int) -> None:
        self.device = device

    def set(self, clock: int) -> None:
        """Limit the clock of the device to `clock`, which is one of `clocks`."""

    def give_back(self) -> None:
        """Remove the limit that `set` has set. Does nothing if there is none."""


class Dry(Actuator):
    """Actuator without effect, for trials. Its clocks are percentages of the highest clock."""

    clocks = range(10, 101)
    unit = "%"
    is_dry = True


class Zeus(Actuator):
    """Actuator that uses the library `zeus`, for NVIDIA and AMD cards. Raises ConfigError if zeus cannot be used."""

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
        """Limit the clock of the card to `clock`."""
        self._gpus.set_gpu_locked_clocks(self.device, self.clocks[0], clock)

    def give_back(self) -> None:
        """Remove the limit on the card's clock."""
        self._gpus.reset_gpu_locked_clocks(self.device)


def made(name: str, device: int) -> Actuator:
    """Return a new actuator for a device. Raises ConfigError if `name` is not "dry", "zeus" or a "module:Class"."""
    kinds: dict[str, type[Actuator]] = {"dry": Dry, "zeus": Zeus}
    try:
        return kinds[name](device) if name in kinds else named(name)(device)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'dynatrain.clocks.actuator: "{name}" cannot be imported ({error}); give "module:Class" of a class derived '
            "from ds_dynatrain.clocks.actuator.Actuator"
        ) from error
