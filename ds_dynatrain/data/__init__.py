"""Data loading that follows the world: which rank gets which samples of a global batch, in which order.

`batch` assigns samples to ranks and micro-batches, optionally in leaves: micro-batches of fixed size that have the same
samples in every world. `order` determines the samples of each global batch, and records how far training has come.
`source` extracts the data set and settings from a torch loader. `loader` has the loaders that a user iterates over, and
the protocol `LoaderHost`, which an engine implements for them. The package depends on torch and not on DeepSpeed.

This package may import only `transfer` and `support`. Begin reading at `loader`.
"""

from ds_dynatrain.data.batch import BatchArithmetic, ColumnArithmetic, Leaf, LeafArithmetic, Slot, nearest_even
from ds_dynatrain.data.loader import EvaluationLoader, MicroBatch, Pass, TrainLoader
from ds_dynatrain.data.order import Cursor, EpochOrder
from ds_dynatrain.data.source import DataSource
from ds_dynatrain.data.workers import WorkerStart

__all__ = [
    "BatchArithmetic",
    "ColumnArithmetic",
    "Cursor",
    "DataSource",
    "EpochOrder",
    "EvaluationLoader",
    "Leaf",
    "LeafArithmetic",
    "MicroBatch",
    "Pass",
    "Slot",
    "TrainLoader",
    "WorkerStart",
    "nearest_even",
]
