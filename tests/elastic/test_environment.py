"""What is read from the environment of a launch, and what is written there for torch."""

from __future__ import annotations

import pytest

from ds_dynatrain.elastic.environment import WATCHDOG, local_rank, settle_watchdog
from ds_dynatrain.errors import ConfigError


@pytest.mark.parametrize("given", [{}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, dict(WATCHDOG)])
def test_torchs_watchdog_is_told_to_do_nothing(given: dict[str, str]) -> None:
    """Also where torchrun has said otherwise, as it does by itself."""
    variables = {**given, "HOME": "/"}
    settle_watchdog(variables)
    assert variables == {**WATCHDOG, "HOME": "/"}


@pytest.mark.parametrize(
    ("name", "value"), [("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"), ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")]
)
def test_what_the_user_has_set_is_not_changed_in_silence(name: str, value: str) -> None:
    variables = {name: value}
    with pytest.raises(ConfigError, match=f"{name}={value}: .*has to be 0.*leave it out"):
        settle_watchdog(variables)
    assert variables == {name: value}


def test_the_number_on_the_machine() -> None:
    assert local_rank({}) == local_rank({"LOCAL_RANK": "-1"}) == 0 and local_rank({"LOCAL_RANK": "3"}) == 3
