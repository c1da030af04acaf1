"""What is read from the environment of a launch, and what is written there for torch."""

from __future__ import annotations

import pytest

from ds_dynatrain.elastic.environment import COORDINATOR, NODE, WATCHDOG, local_rank, settle_watchdog
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


def test_a_launch_asks_for_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise follow from how many nodes happen to be there."""
    import torch

    import ds_dynatrain

    monkeypatch.setenv(COORDINATOR, "127.0.0.1:1")
    monkeypatch.setenv(NODE, "n")
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "dynatrain": {}}
    config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
    with pytest.raises(ConfigError, match="train_batch_size is None, train_micro_batch_size_per_gpu 3"):
        ds_dynatrain.initialize(model=torch.nn.Linear(2, 2), config=config)
