"""Files that an Accelerator has beside a checkpoint, and does without where that is one of `engine.save`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate.accelerator
from accelerate.utils import MODEL_NAME

from ds_dynatrain.adapters.replaced import replaced
from ds_dynatrain.integrations.huggingface import folders


def nothing(output_dir: Any, *arguments: Any, **named: Any) -> Any:
    """In the place of `save_accelerator_state`: schedules, streams and positions are in the checkpoint already."""
    return output_dir


@contextmanager
def without_ours() -> Iterator[list[Path]]:
    """A block in which Accelerate reads files beside its own checkpoints alone; the list names those folders."""
    stock, read = accelerate.accelerator, list[Path]()
    load_rest, load_object = stock.load_accelerator_state, stock.load_custom_state

    def rest(folder: Any, *arguments: Any, **named: Any) -> Any:
        if folders.is_ours(Path(folder) / MODEL_NAME):
            return {}
        read.append(Path(folder))
        return load_rest(folder, *arguments, **named)

    def custom(value: Any, folder: Any, number: int = 0) -> None:
        if not folders.is_ours(Path(folder) / MODEL_NAME):
            load_object(value, folder, number)

    with replaced(stock, "load_accelerator_state", rest), replaced(stock, "load_custom_state", custom):
        yield read
