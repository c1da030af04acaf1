"""Description of another tool's checkpoint: where each value is stored, and what state it has outside tensors.

The state outside tensors is called the carry. It is a dictionary.

| key of the carry | value |
|---|---|
| `groups` | hyper-parameters of each optimizer group, keyed by name |
| `scalars` | the optimizer's scalars: a map from name to a map from the tensor's number, as text, to the value |
| `counters` `windows` | as in the carry of a running job |
| `scaler` | the loss scaler's fields, keyed by DeepSpeed's names |
| `scheduler` `random-LTD` | the states of the learning-rate schedule and of random-LTD |

A job that loads the checkpoint keeps its own values for everything that the checkpoint lacks.

`take` converts such a checkpoint to this package's format, tensor by tensor and atomically, like a save. It needs
memory for the largest tensor in one state kind. If the checkpoint has only weights, masters are made from them, and the
optimizer of a job that loads the result starts fresh.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ds_dynatrain.checkpoint import folder as folders
from ds_dynatrain.checkpoint.extents import Extent, name_of
from ds_dynatrain.checkpoint.files import Progress, check_names, dumped, silent
from ds_dynatrain.checkpoint.manifest import Manifest, ManifestRow
from ds_dynatrain.checkpoint.others.torch_files import Archive, Stored, check_crcs, value_of
from ds_dynatrain.checkpoint.reading import Reader, whole
from ds_dynatrain.checkpoint.record import WRITER, TrainingRecord, check_agreement, check_tensors, rank_file, sum_of
from ds_dynatrain.checkpoint.writing import Share, data_file
from ds_dynatrain.errors import CheckpointDamaged, CheckpointError
from ds_dynatrain.space import MASTER, WEIGHT, Layout, LogicalTensor

LOW = (torch.float32, torch.bfloat16, torch.float16)
"""Element types of weights from which float32 masters can be made."""


@dataclass(frozen=True, eq=False)
class Foreign:
    """The description of another tool's checkpoint.

    path: its folder or file.
    format: the name of its format, for messages.
    manifest: the position of each value. Rows refer to files below `path` and have no digests.
    tensors: the logical tensors, ordered by group, frozen ones last.
    step: number of optimizer steps done.
    carry: the state outside tensors, as in the table above.
    buffers: the module's buffers, keyed by name.
    left_out: names of content that is not converted.
    archives: the zip files whose CRC32s cover all values.
    """

    path: Path
    format: str
    manifest: Manifest
    tensors: tuple[LogicalTensor, ...]
    step: int = 0
    carry: Mapping[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, Stored] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    archives: tuple[Archive, ...] = ()

    @staticmethod
    def of(
        path: Path,
        format: str,
        tensors: Iterable[LogicalTensor],
        rows: Iterable[ManifestRow],
        step: int,
        carry: Mapping[str, Any],
        scalars: Mapping[str, Mapping[str, float]],
        **more: Any,
    ) -> Foreign:
        """Return the description of a checkpoint whose tensors may be given in any order.

        carry: the state outside tensors, without the optimizer's scalars; empty if only weights are known.
        scalars: the optimizer's scalars, keyed by name and by the tensor's name.
        more: the fields after `carry`.
        """
        ordered = tuple(sorted(tensors, key=lambda tensor: (not tensor.trainable, tensor.group)))
        numbers = {each.name: str(number) for number, each in enumerate(ordered)}
        by_number = {kind: {numbers[name]: value for name, value in scalars[kind].items()} for kind in scalars}
        whole = {**carry, "scalars": by_number} if carry else {}
        return Foreign(path, format, Manifest.of(rows), ordered, step, whole, **more)

    @property
    def kinds(self) -> list[str]:
        """State kinds in the checkpoint."""
        return list(dict.fromkeys(kind for _, kind in self.manifest.rows))


def whole_row(tensor: LogicalTensor, kind: str, stored: Stored) -> ManifestRow:
    """Return the manifest row of a tensor that is stored as a whole.

    Raises CheckpointError if the stored tensor differs in size or is not in row-major order.
    """
    if stored.numel != tensor.numel or not stored.is_dense:
        raise CheckpointError(
            f"{stored.file} has {stored.shape} where {kind} of {tensor.name!r} {tensor.shape} is expected, row by "
            "row; save the checkpoint again, with contiguous tensors"
        )
    return stored_row(tensor, kind, stored, Extent(0, tensor.numel))


def stored_row(tensor: LogicalTensor, kind: str, stored: Stored, extent: Extent, first: int = 0) -> ManifestRow:
    """Return the manifest row of an extent that begins at element `first` of a stored buffer."""
    at = stored.offset + first * stored.dtype.itemsize
    return ManifestRow(tensor.name, kind, name_of(stored.dtype), tensor.shape, extent, stored.file, at, 0)


def cast_from_master(tensor: LogicalTensor, dtype: torch.dtype) -> ManifestRow:
    """Return the manifest row of weights that are not stored but cast from their master."""
    return ManifestRow(tensor.name, WEIGHT, name_of(dtype), tensor.shape, Extent(0, tensor.numel), "", 0, 0)


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of an optimizer group: all its entries except the parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def number_of(folder: Path, value: Any) -> float:
    """Return an optimizer's scalar as a number.

    value: a number, or a stored tensor, which is read from its file in `folder`.

    Raises CheckpointDamaged if the tensor does not have exactly one element.
    """
    if isinstance(value, Stored) and value.numel != 1:
        raise CheckpointDamaged(f"{folder / value.file} has a tensor of shape {value.shape} where a number is expected")
    return float(value_of(folder, value).item() if isinstance(value, Stored) else value)


def take(
    foreign: Foreign, folder: Path, carry: Any, rest: Any, tensors: Sequence[Share], progress: Progress = silent
) -> Path:
    """Convert another tool's checkpoint to one of this package, the latest in `folder`. Return the new one's path.

    carry: the encoded shared extra state.
    rest: the encoded extra state of rank 0.
    tensors: the tensors to which `rest` refers.
    progress: called with the number of bytes of each tensor.

    Raises CheckpointDamaged, naming tensor and kind, if the description is invalid, or, naming file and member, if
    values have a wrong CRC32. Raises CheckpointError if the folder already has a checkpoint of that step. A failure
    leaves nothing behind.
    """
    check_names([each.name for each in foreign.tensors], foreign.kinds)
    check_tensors(foreign.tensors)
    foreign.manifest.check(None)
    check_agreement(foreign.tensors, foreign.kinds, foreign.manifest)
    for tensor, kind in foreign.manifest.rows:
        foreign.manifest.runs(tensor, kind)
    tag, own = f"step{foreign.step}", dumped({"streams": None, "rest": rest})
    with folders.locked(folder):
        hidden = folders.begin(folder, tag)
        try:
            rows = list(_written(foreign, hidden, tensors, progress))
            folders.write(hidden / rank_file(0), own)
            said = TrainingRecord(
                step=foreign.step,
                layout=Layout(data=1, zero_stage=0).to_dict(),
                generation=0,
                seed=0,
                kinds=sorted({row.kind for row in rows} - {share.kind for share in tensors}, key=_place),
                tensors=[(each.name, list(each.shape), each.group, each.expert) for each in foreign.tensors],
                carry=carry,
                rests=[0],
                sums={},
                sizes={},
                written_by=WRITER,
                converted_from=foreign.format,
            )
            folders.seal(hidden, said, rows, {rank_file(0): sum_of(own)})
            return folders.finish(hidden, tag)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def bytes_of(foreign: Foreign) -> int:
    """Return the total number of bytes that `take` reports to its `progress`."""
    return sum(tensor.numel * dtype.itemsize for tensor in foreign.tensors for _, dtype in _stored(foreign, tensor))


def _written(foreign: Foreign, hidden: Path, tensors: Sequence[Share], progress: Progress) -> Iterator[ManifestRow]:
    """Check the CRC32s of a checkpoint, write our data files into the folder `hidden`, and yield their manifest rows.

    tensors: additional tensors to write.
    """
    files: dict[torch.dtype, Callable[[Share], ManifestRow]] = {}
    check_crcs(foreign.path, foreign.archives)
    with ExitStack() as stack:

        def write(share: Share) -> ManifestRow:
            dtype = share.matrix.dtype
            if dtype not in files:
                files[dtype] = stack.enter_context(data_file(hidden, 0, dtype))
            return files[dtype](share)

        reader = stack.enter_context(Reader(foreign.path, foreign.manifest, links=True))
        for tensor in foreign.tensors:
            weight = foreign.manifest.dtype(tensor.name, WEIGHT)
            for kind, dtype in _stored(foreign, tensor):
                held = kind if (tensor.name, kind) in foreign.manifest.rows else WEIGHT  # from which a master is made
                values = whole(reader, tensor, held, dtype).view(1, -1)
                share = Share(tensor.name, kind, tensor.shape, Extent(0, tensor.numel), values)
                yield write(share)
                if kind == MASTER and weight is not None:
                    yield replace(share, kind=WEIGHT).row(weight)
                del share, values  # before the next ones are read
                progress(tensor.numel * dtype.itemsize)
        yield from map(write, tensors)


def _stored(foreign: Foreign, tensor: LogicalTensor) -> Iterator[tuple[str, torch.dtype]]:
    """Yield (state kind, element type) for each state kind of a tensor that is to be stored.

    A weight is not stored if it has a master. For a trainable weight without a master, a master is stored instead.
    """
    types = ((kind, foreign.manifest.dtype(tensor.name, kind)) for kind in foreign.kinds)
    held = {kind: dtype for kind, dtype in types if dtype is not None}
    if MASTER not in held and tensor.trainable and held.get(WEIGHT) in LOW:
        held[MASTER] = torch.float32
    for kind in sorted(held, key=_place):
        if kind != WEIGHT or MASTER not in held:
            yield kind, held[kind]


def _place(kind: str) -> tuple[int, str]:
    """Return the sort key of a state kind: weights first, then masters, then moments by name."""
    return ({WEIGHT: 0, MASTER: 1}.get(kind, 2), kind)
