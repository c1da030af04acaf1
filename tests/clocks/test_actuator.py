"""What sets clocks: zeus and its errors, actuators by name, and what is refused before a process joins a job."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from ds_dynatrain.clocks.actuator import Dry, Zeus, made
from ds_dynatrain.clocks.extension import Clocks
from ds_dynatrain.config import split_config
from ds_dynatrain.errors import ConfigError, UnsupportedError
from tools.throttle import Throttle


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What zeus says of the cards, without the library."""
    known = Mock()
    known.get_supported_memory_clocks.return_value = [2619, 1593]
    known.get_supported_graphics_clocks.return_value = [1980, 1965, 345]
    device = ModuleType("zeus.device")
    device.get_gpus = lambda: known  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zeus", ModuleType("zeus"))
    monkeypatch.setitem(sys.modules, "zeus.device", device)
    return known


def extension(actuator: str, **balance: Any) -> Clocks:
    """The extension of a job with these blocks."""
    _, block = split_config({"dynatrain": {"clocks": {"actuator": actuator}, "balance": balance}})
    return Clocks(block)  # type: ignore[arg-type]


def test_zeus_limits_a_card_and_gives_it_back(cards: Mock) -> None:
    actuator = made("zeus", 3)
    assert list(actuator.clocks) == [345, 1965, 1980]
    cards.get_supported_graphics_clocks.assert_called_once_with(3, 2619)
    actuator.set(1965)
    cards.set_gpu_locked_clocks.assert_called_once_with(3, 345, 1965)
    actuator.give_back()
    cards.reset_gpu_locked_clocks.assert_called_once_with(3)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeus", None)
    with pytest.raises(ConfigError, match=r'clocks\.actuator: "zeus" needs that library .* pip install "ds-dynatrain'):
        Zeus(0)


def test_without_cards_the_error_says_so(cards: Mock) -> None:
    cards.get_supported_memory_clocks.side_effect = IndexError("list index out of range")
    with pytest.raises(ConfigError, match=r"finds no clocks of device 0 \(list index out of range\)"):
        Zeus(0)


def test_without_permission_the_job_does_not_start(cards: Mock) -> None:
    cards.reset_gpu_locked_clocks.side_effect = RuntimeError("Insufficient Permissions")
    with pytest.raises(ConfigError, match=r'"zeus" may not set .* \(Insufficient Permissions\).* ZEUSD_SOCK_PATH'):
        extension("zeus").check_launch(is_elastic=False)


def test_actuators_have_names() -> None:
    assert isinstance(made("dry", 0), Dry) and isinstance(made("tools.throttle:Throttle", 0), Throttle)
    for missing in ("tools.throttle:Missing", "tools.missing:Throttle"):
        with pytest.raises(ConfigError, match=r'cannot be imported .* give "module:Class"'):
            made(missing, 0)
    with pytest.raises(ConfigError, match=r"dynatrain\.clocks\.actuator"):
        extension("nvml")


def test_clocks_need_times_and_layers_that_stay() -> None:
    with pytest.raises(ConfigError, match=r'nothing is measured; add "balance": \{"mode": "advise"\}'):
        extension("dry", mode="off").check_launch(is_elastic=False)
    with pytest.raises(UnsupportedError, match=r'does not look slow; set dynatrain\.balance\.mode to "advise"'):
        extension("tools.throttle:Throttle", mode="act").check_launch(is_elastic=False)
    for actuator in ("off", "dry"):
        extension(actuator, mode="act").check_launch(is_elastic=False)


def test_one_engine_of_a_process_sets_its_clock() -> None:
    with pytest.raises(UnsupportedError, match="one device has one clock"):
        extension("dry").check_beside(Mock(), Mock(), 1)
