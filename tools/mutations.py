"""Mutations of a checkpoint's files, such as broken disks, truncated copies and attackers cause. Each follows from a
seed.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import torch
from specimens import Specimen

from ds_dynatrain.checkpoint import record
from ds_dynatrain.checkpoint.extents import Extent
from ds_dynatrain.checkpoint.manifest import Manifest, ManifestRow

Files = dict[str, bytes]
Mutation = Callable[[Random, Specimen], Files]
VICTIM = "/dev/shm/fuzz-victim"
"""A name that would become a file here if it were used as a path."""
WORDS = (
    *(
        "",
        "a",
        "0",
        "..",
        "../../../../victim",
        VICTIM,
        "a/../../../b",
        "\0",
        "a\nb",
        "x" * 300,
        "\ud800",
    ),
    *(
        "step",
        "fp32",
        "master",
        "weight",
        "rest",
        "float32",
        "__tensor__",
        "__tuple__",
        "params",
        "\\",
        ".hidden",
        "a.bias",
    ),
)
NUMBERS = (
    -1,
    0,
    1,
    2,
    7,
    1 << 31,
    1 << 40,
    1 << 62,
    1 << 63,
    1 << 70,
    -(1 << 63),
    0.5,
    1e300,
    float("nan"),
    float("inf"),
)
MOST_CHANGES = 3


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _with(files: Files, name: str, data: bytes | bytearray) -> Files:
    return {**files, name: bytes(data)}


def _flipped(draw: Random, data: bytes, low: int, high: int) -> bytes:
    changed = bytearray(data)
    changed[draw.randrange(low, high)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _some(draw: Random, files: Files) -> tuple[str, bytes]:
    name = draw.choice([name for name, data in files.items() if data])
    return name, files[name]


def value_flipped(draw: Random, specimen: Specimen) -> Files:
    """Flip one bit of a tensor's values."""
    name, low, high = draw.choice(specimen.values)
    return _with(specimen.files, name, _flipped(draw, specimen.files[name], low, high))


def bits_flipped(draw: Random, specimen: Specimen) -> Files:
    """Flip some bits anywhere."""
    files = specimen.files
    for _ in range(draw.choice((1, 1, 2, 5))):
        name, data = _some(draw, files)
        files = _with(files, name, _flipped(draw, data, 0, len(data)))
    return files


def cut_off(draw: Random, specimen: Specimen) -> Files:
    """Truncate a file, or append to it."""
    name, data = _some(draw, specimen.files)
    more = draw.randbytes(draw.randrange(1, 200)) if draw.random() < 0.2 else b""
    return _with(specimen.files, name, data + more if more else data[: draw.randrange(len(data))])


def swapped(draw: Random, specimen: Specimen) -> Files:
    """Swap two ranges of a file, or two files."""
    if draw.random() < 0.3 and len(specimen.files) > 1:
        one, other = draw.sample(sorted(specimen.files), 2)
        return {**specimen.files, one: specimen.files[other], other: specimen.files[one]}
    name, data = _some(draw, specimen.files)
    length = draw.randrange(1, max(2, len(data) // 3))
    low, high = sorted((draw.randrange(len(data)), draw.randrange(len(data))))
    high = max(low + length, high)
    first, second = data[low : low + length], data[high : high + length]
    return _with(specimen.files, name, data[:low] + second + data[low + length : high] + first + data[high + length :])


def overwritten(draw: Random, specimen: Specimen) -> Files:
    """Overwrite a range with zeros, ones, or random bytes."""
    name, data = _some(draw, specimen.files)
    at, length = draw.randrange(len(data)), draw.choice((1, 4, 8, 64, 512))
    fill = draw.choice((bytes(length), b"\xff" * length, draw.randbytes(length)))
    return _with(specimen.files, name, (data[:at] + fill + data[at + length :])[: len(data)])


def gone(draw: Random, specimen: Specimen) -> Files:
    """Remove or rename a file."""
    names = sorted(specimen.files)
    name = draw.choice(names)
    files = {each: data for each, data in specimen.files.items() if each != name}
    if draw.random() < 0.5:
        other = draw.choice(names).replace(*draw.choice((("0", "1"), ("1", "70000"), ("rank_0", "rank_9"), (".", "-"))))
        files[other] = specimen.files[name]
    return files


# ---- what stands in them ---------------------------------------------------------------------------------------------


def odd(draw: Random) -> Any:
    """Return a value that no reader expects."""
    return draw.choice(
        (
            draw.choice(WORDS),
            draw.choice(WORDS),
            draw.choice(NUMBERS),
            draw.choice(NUMBERS),
            None,
            draw.random() < 0.5,
            [draw.choice(NUMBERS)],
            [draw.choice(WORDS), []],
            {draw.choice(WORDS): draw.choice(NUMBERS)},
            [[[[draw.choice(WORDS)]]]],
        )
    )


def _changed(draw: Random, tree: Any, make: Callable[[Random], Any] = odd) -> Any:
    """Return a copy of nested containers in which some values are replaced, removed or duplicated.

    make: function that makes a new value.
    """
    tree = copy.deepcopy(tree)
    for _ in range(draw.randrange(1, MOST_CHANGES + 1)):
        places = list(_places(tree))
        if places:
            held, key = draw.choice(places)
            how = draw.random()
            if how < 0.65:
                held[key] = make(draw)
            elif how < 0.8:
                del held[key]
            elif isinstance(held, list):
                held.append(copy.deepcopy(held[key]) if how < 0.9 else make(draw))
            else:
                held[draw.choice(WORDS)] = copy.deepcopy(held[key]) if how < 0.9 else make(draw)
    return tree


def _places(tree: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) for everything that can be changed in nested containers."""
    held = tree if isinstance(tree, list | dict) else getattr(tree, "__dict__", None)
    if held is None or isinstance(tree, torch.Tensor | type) or depth > 12:
        return
    for key in list(range(len(held))) if isinstance(held, list) else list(held):
        yield held, key
        yield from _places(held[key], depth + 1)


def _odd_tensor(draw: Random) -> Any:
    """Return a value as `odd` does, or a tensor of any size that needs no more bytes than it claims."""
    if draw.random() < 0.7:
        return odd(draw)
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64))
    shape = draw.choice(((), (0,), (3,), (1 << 40,), (1 << 20, 1 << 20), (5, 7), (0, 1 << 62)))
    numel = torch.Size(shape).numel()
    return torch.zeros(shape, dtype=dtype) if numel < 100 else torch.zeros((), dtype=dtype).expand(shape)


def edited(draw: Random, specimen: Specimen) -> Files:
    """Change a value in a file, and make all checksums right again."""
    if specimen.is_ours:
        return _edited_ours(draw, specimen.files)
    name = draw.choice([name for name in specimen.files if not name.endswith(".distcp")])
    data = specimen.files[name]
    if name.endswith(".safetensors"):
        return _with(specimen.files, name, _edited_header(draw, data))
    if not name.endswith(".pt"):
        return _with(specimen.files, name, pickle.dumps(_changed(draw, pickle.loads(data))))
    made = io.BytesIO()
    torch.save(_changed(draw, torch.load(io.BytesIO(data), weights_only=False), _odd_tensor), made)
    return _with(specimen.files, name, made.getvalue())


def repickled(draw: Random, specimen: Specimen) -> Files:
    """Change bytes of a pickle, and make its CRC32 right again."""
    names = [name for name in specimen.files if name.endswith((".pt", ".metadata"))]
    if not names:
        return bits_flipped(draw, specimen)
    name = draw.choice(names)
    data = specimen.files[name]
    if not name.endswith(".pt"):
        return _with(specimen.files, name, _spoiled(draw, data))
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for each in old.infolist():
            held = old.read(each)
            new.writestr(each.filename, _spoiled(draw, held) if each.filename.endswith("data.pkl") else held)
    return _with(specimen.files, name, made.getvalue())


def _spoiled(draw: Random, data: bytes) -> bytes:
    """Return a pickle in which operations are changed or repeated."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(data))
        part = draw.choice(
            (bytes([draw.randrange(256)]), b"", data[at : at + draw.randrange(1, 40)] * 2, b"r\xff\xff\xff\x7f")
        )
        data = data[:at] + part + data[at + 1 :]
    return data


def _edited_header(draw: Random, data: bytes) -> bytes:
    end = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(_changed(draw, json.loads(data[8:end]))).encode("utf-8", "replace")
    return len(text).to_bytes(8, "little") + text + data[end:]


def _edited_ours(draw: Random, files: Files) -> Files:
    files = dict(files)
    said = json.loads(files[record.RECORD])
    said.pop("sum")
    what = draw.randrange(3)
    if what == 0:
        said = _changed(draw, said)
    elif what == 1:
        name = record.rank_file(0)
        files[name] = json.dumps(_changed(draw, json.loads(files[name]))).encode()
    else:
        rows = list(Manifest.from_bytes(files[record.MANIFEST]))
        place = draw.randrange(len(rows))
        rows[place : place + 1] = draw.choice(([], [rows[place]] * 2, [_another(draw, rows[place])]))
        files[record.MANIFEST] = Manifest.of(rows).to_bytes()
    if isinstance(said.get("sums"), dict):
        said["sums"].update({name: record.sum_of(files[name]) for name in {*said["sums"]} & {*files}})
    said["sum"] = record.sum_of(json.dumps(said, sort_keys=True).encode())
    files[record.RECORD] = json.dumps(said).encode()
    return files


def _another(draw: Random, row: ManifestRow) -> ManifestRow:
    """Return a manifest row with a wrong value."""
    number = draw.choice((-1, 0, 1, 3, 8, 64, 1 << 31, 1 << 40, 1 << 62))
    word = draw.choice(WORDS)
    part = Extent(**{**vars(row.extent), draw.choice(("start", "length", "step", "count")): number})
    shape = draw.choice(((number,), (), (0,), (*row.shape, 1), tuple(reversed(row.shape)), (1 << 31, 1 << 31)))
    change = draw.choice(("tensor", "kind", "dtype", "file", "offset", "digest", "extent", "extent", "shape"))
    value: Any = {"offset": number, "digest": abs(number), "extent": part, "shape": shape}.get(change, word)
    if change == "dtype":
        value = draw.choice(("float64", "int8", "bfloat16", "complex64", "Tensor", "bool", word))
    return replace(row, **{change: value})


FOUND = "one bit of a tensor's values"
"""The mutation that must be found in all formats with checksums."""
MUTATIONS: dict[str, tuple[Mutation, int]] = {
    FOUND: (value_flipped, 2),
    "some bits anywhere": (bits_flipped, 2),
    "cut off, or longer": (cut_off, 1),
    "ranges or files swapped": (swapped, 2),
    "a range overwritten": (overwritten, 2),
    "a file gone, or by another name": (gone, 1),
    "contents edited, sums made right": (edited, 6),
    "a pickle spoiled, CRC32 made right": (repickled, 4),
}
"""The mutations, with their relative frequencies."""


def mutated(draw: Random, specimen: Specimen) -> tuple[str, Files]:
    """Return (description, files) after a random mutation. Mutations that cannot be written, such as some values, are
    skipped.
    """
    names = [name for name in MUTATIONS if name != FOUND or specimen.values]
    while True:
        name = draw.choices(names, [MUTATIONS[each][1] for each in names])[0]
        try:
            return name, MUTATIONS[name][0](draw, specimen)
        except Exception:
            continue
