"""Data that follows the world: how a global batch is dealt, in which order, and the loaders that do it.

`batch` deals samples to ranks and micro-batches, `leaves` does so in parts that are the same in every world, `order`
says which samples a global batch has, `cursor` where training stands, `source` takes a data set or a torch loader
apart, `loader`, `windows` and `evaluation` are what a user iterates over, `host` is what they need from an engine. The
package knows torch, and no DeepSpeed.
"""

from ds_dynatrain.data.batch import (
    BatchArithmetic,
    ColumnArithmetic,
    Leaf,
    LeafArithmetic,
    Slot,
    SlotTable,
    Unevenness,
    uneven,
)
from ds_dynatrain.data.loader import EvaluationLoader, Host, MicroBatch, Pass, TrainLoader, Windows
from ds_dynatrain.data.order import Cursor, EpochOrder
from ds_dynatrain.data.source import STOCK_WORKERS, Source
from ds_dynatrain.data.workers import WorkerStart

__all__ = [
    "STOCK_WORKERS",
    "BatchArithmetic",
    "ColumnArithmetic",
    "Cursor",
    "EpochOrder",
    "EvaluationLoader",
    "Host",
    "Leaf",
    "LeafArithmetic",
    "MicroBatch",
    "Pass",
    "Slot",
    "SlotTable",
    "Source",
    "TrainLoader",
    "Unevenness",
    "Windows",
    "WorkerStart",
    "uneven",
]
