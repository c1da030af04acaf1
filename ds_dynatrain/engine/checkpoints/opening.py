"""Opening a checkpoint in a folder: ours, one that was converted to ours, or DeepSpeed's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_dynatrain.adapters.pipeline import PipelineTemplate
from ds_dynatrain.checkpoint import Saved
from ds_dynatrain.checkpoint.others import ZeroFolder, is_zero_folder
from ds_dynatrain.checkpoint.record import RECORD
from ds_dynatrain.engine.checkpoints.sources import Converted, Source, Stock, Universal
from ds_dynatrain.errors import CheckpointError
from ds_dynatrain.reshard.core import EngineCore


def opened(path: Path, engine: EngineCore, present: dict[str, Any] | None, trust_pickle: bool) -> Source:
    """Open the checkpoint in a folder. present: the present shared carry, into which another tool's is read.

    Raise CheckpointError for a folder without a checkpoint, and for another tool's checkpoint if there is no carry.
    """
    if (path / RECORD).is_file() or present is None or not is_zero_folder(path):
        saved = Saved.open(path)
        if not saved.record.converted_from:
            return Universal(saved)
        if present is None:
            raise CheckpointError(
                f"{path} was converted from {saved.record.converted_from}, which is not all of a training; load it "
                "with engine.load in a training that has begun"
            )
        return Converted(saved, engine, present)
    template = getattr(engine.host.shaper, "template", None)
    prefixes = template.prefixes() if isinstance(template, PipelineTemplate) else ()
    held = ZeroFolder.open(path, trust_pickle, prefixes)
    check_batch(engine, held)
    return Stock(held, engine, present)


def check_batch(engine: EngineCore, held: ZeroFolder) -> None:
    """Raise CheckpointError if a checkpoint of DeepSpeed's was trained with another global batch than this job has.

    DeepSpeed's own load does not notice if the batch follows from the micro-batch and the number of ranks.
    """
    there, here = held.global_batches(), int(engine.job.batch_sizes.train_batch_size)
    if there and here not in there:
        raise CheckpointError(
            f"{held.path}: the global batch is {there[-1]} samples there and {here} here, so steps, rates and the "
            f'order of samples would be others; give "train_batch_size": {there[-1]}'
        )
