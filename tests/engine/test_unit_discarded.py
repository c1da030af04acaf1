"""A global batch in which the world was aborted: where it begins when it is dealt again."""

from __future__ import annotations

from typing import Any

from ds_dynatrain.engine.discarded import DiscardableEngine


class Loader:
    """One that has a position."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])


def test_a_discarded_batch_after_a_restoration_is_dealt_again_from_there() -> None:
    """Torn between two batches, taken back, asked once more before the first engine's next batch."""
    loader = Loader()
    window: Any = DiscardableEngine.__new__(DiscardableEngine)
    window.train_loaders = {"train": loader}
    loader.at = 16
    window.go_back(has_dealt=False)
    loader.at = 15  # what was restored
    window.note_window()
    window.open_window(stays_discarded=True)
    loader.at += 1
    window.go_back(has_dealt=True)
    assert loader.at == 15
