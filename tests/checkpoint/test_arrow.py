"""The files as Arrow has them: where values lie, what any reader of Arrow finds, and bytes that are no such files."""

from __future__ import annotations

import io
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import ipc

from ds_dynatrain.checkpoint.arrow import ArrowValues, read_table, table_bytes
from ds_dynatrain.checkpoint.extents import ALIGN, name_of, named
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.errors import CheckpointDamaged
from ds_dynatrain.space import Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds
from tests.checkpoint.worlds import save, state_of

ROOT = Path(__file__).parents[2]
COLUMNS = {"name": "text", "shape": "ints", "at": "int64", "digest": "uint64"}
VALUES = {
    "name": ["a", "", "größe", "d" * 100],
    "shape": [(1, 2), (), (3,), (-(2**62), 4, 5)],
    "at": [0, -1, 2**62, 7],
    "digest": [0, 1, 2**64 - 1, 2**63],
}


def test_a_table_comes_back() -> None:
    assert read_table(table_bytes(COLUMNS, VALUES), COLUMNS) == VALUES
    empty: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    assert read_table(table_bytes(COLUMNS, empty), COLUMNS) == empty


def test_later_columns_are_left_out() -> None:
    data = table_bytes({**COLUMNS, "later": "text"}, {**VALUES, "later": ["x"] * 4})
    assert read_table(data, COLUMNS) == VALUES


@pytest.mark.parametrize("cut", [0, 5, 60, 200, -1, -8, -100])
def test_cut_off(cut: int) -> None:
    with pytest.raises(CheckpointDamaged):
        read_table(table_bytes(COLUMNS, VALUES)[:cut], COLUMNS)


def test_other_columns() -> None:
    for number, kind in enumerate(("ints", "text", "uint64", "int64")):
        name = list(COLUMNS)[number]
        other = {"text": "x", "ints": (1,), "int64": 1, "uint64": 1}[kind]
        data = table_bytes({**COLUMNS, name: kind}, {**VALUES, name: [other] * 4})
        with pytest.raises(CheckpointDamaged, match="columns are not name, shape, at, digest"):
            read_table(data, COLUMNS)
    few = dict(list(COLUMNS.items())[1:])
    with pytest.raises(CheckpointDamaged, match="columns"):
        read_table(table_bytes(few, VALUES), COLUMNS)


def of_strangers(values: list[Any], batches: int = 1, nullable: bool = True, compression: str | None = None) -> bytes:
    """A table of one column "at", as pyarrow writes it."""
    batch = pa.record_batch([pa.array(values, pa.int64())], schema=pa.schema([pa.field("at", pa.int64(), nullable)]))
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, batch.schema, options=ipc.IpcWriteOptions(compression=compression)) as writer:
        for _ in range(batches):
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def test_tables_of_strangers() -> None:
    columns = {"at": "int64"}
    assert read_table(of_strangers([1, 2]), columns) == {"at": [1, 2]}
    refused = {
        "a value is null": of_strangers([1, None]),
        "2 batches": of_strangers([1], batches=2),
        "0 batches": of_strangers([1], batches=0),
        "4194305 rows": of_strangers([0] * (2**22 + 1)),
    }
    for words, data in refused.items():
        with pytest.raises(CheckpointDamaged, match=words):
            read_table(data, columns)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_what_is_packed_is_not_unpacked(compression: str) -> None:
    """A few bytes may stand for any number of them."""
    data, before = of_strangers([0] * (1 << 20), compression=compression), pa.total_allocated_bytes()
    assert len(data) < 1 << 17
    with pytest.raises(CheckpointDamaged, match="compressed"):
        read_table(data, {"at": "int64"})
    assert pa.total_allocated_bytes() <= before


def test_changed_bytes_are_an_error_or_another_table() -> None:
    """Never another exception, and never more memory than the file has."""
    data, draw = table_bytes(COLUMNS, VALUES), random.Random(5)
    refused = 0
    for _ in range(3000):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(data))] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        try:
            read_table(bytes(changed), COLUMNS)
        except CheckpointDamaged:
            refused += 1
    assert refused > 300


def test_all_types_have_a_column() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e5m2):
        assert ArrowValues(io.BytesIO(), dtype).type.bit_width == 8 * dtype.itemsize and named(name_of(dtype)) is dtype
    for name in ("float33", "nn", "Tensor", "__name__", "half"):
        with pytest.raises(CheckpointDamaged):
            named(name)


def test_files_of_earlier_versions() -> None:
    """They were written without pyarrow, and their values are at multiples of 64."""
    saved = Saved.open(ROOT / "tests" / "checkpoint" / "earlier")
    found: dict[tuple[str, str], list[float]] = {}
    with Reader(saved.path, saved.manifest) as reader:
        for row in saved.manifest:
            assert not row.file or (reader.is_sound(row) and row.offset % 64 == 0)
            found.setdefault((row.kind, row.tensor), []).extend(reader.values(row).tolist() if row.file else [])
    first = {"master": 100.0, "exp_avg": 200.0, "exp_avg_sq": 300.0}
    assert found == {
        **{(kind, "a"): [begin + number for number in range(15)] for kind, begin in first.items()},
        ("weight", "a"): [],
        ("weight", "frozen"): [15.0, 16.0, 17.0, 18.0, 19.0],
    }


TENSORS = [LogicalTensor("a", (30, 50)), LogicalTensor("b", (7,)), LogicalTensor("frozen", (5,), -1)]


def written(folder: Path) -> tuple[VirtualParameterSpace, dict[str, torch.Tensor]]:
    layout = Layout(data=2, zero_stage=1)
    vps = VirtualParameterSpace.of(TENSORS, ZeroRules(), standard_kinds(2), layout, (0, 1))
    state = state_of(vps)
    save(folder, vps, layout, state)
    return vps, state


def test_values_are_aligned(tmp_path: Path) -> None:
    written(tmp_path)
    for file in tmp_path.glob("*.arrow"):
        data = file.read_bytes()
        assert data[:8] == b"ARROW1\0\0" and data[-6:] == b"ARROW1"
    layout = Layout(data=3, zero_stage=2)
    vps = VirtualParameterSpace.of(TENSORS, ZeroRules(), standard_kinds(4), layout, (0, 1, 2))
    (tmp_path / "other").mkdir()
    for row in save(tmp_path / "other", vps, layout, state_of(vps)):
        assert row.offset % ALIGN == 0


def test_pyarrow_reads_all_of_it(tmp_path: Path) -> None:
    vps, state = written(tmp_path)
    for file in tmp_path.glob("*.arrow"):
        found = ipc.open_file(pa.memory_map(str(file))).read_all()
        found.validate(full=True)
        if file.name == "manifest.arrow":
            continue
        assert found.schema.field(0).metadata[b"dtype"].decode() in file.name
    rows = ipc.open_file(pa.memory_map(str(tmp_path / "manifest.arrow"))).read_all().to_pylist()
    for row in [each for each in rows if each["file"] and each["dtype"] == "float32"]:
        batches = ipc.open_file(pa.memory_map(str(tmp_path / row["file"])))
        first = int(vps.bases[vps.line.index(row["tensor"])]) + row["start"]
        wanted = state[row["kind"]][first : first + row["length"]].tolist()
        assert wanted in [batches.get_batch(n).column(0).to_pylist() for n in range(batches.num_record_batches)]


def test_the_reader_of_the_docs(tmp_path: Path) -> None:
    vps, state = written(tmp_path)
    page = (ROOT / "docs" / "dev" / "format.md").read_text()
    script = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "read_tensor.py" in code)
    (tmp_path / "read_tensor.py").write_text(script)
    arguments = [sys.executable, "read_tensor.py", str(tmp_path), "a", "exp_avg"]
    printed = subprocess.run(arguments, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == str(state["exp_avg"][: 30 * 50].reshape(30, 50).numpy())


def test_batches_of_any_size(tmp_path: Path) -> None:
    """Values lie where the file is said to have them, which is where pyarrow finds them."""
    sizes = (3, 0, 1, 8, 1 << 20)
    for dtype in (torch.float32, torch.int8, torch.bfloat16):
        path = tmp_path / f"{name_of(dtype)}.arrow"
        values = [torch.arange(size, dtype=torch.float32).to(dtype) for size in sizes]
        held = [each.view(torch.uint8).numpy().tobytes() for each in values]
        with open(path, "wb") as file:
            column = ArrowValues(file, dtype)
            begins = [column.write(each) for each in values]
            column.close()
        data = path.read_bytes()
        assert all(data[at : at + len(each)] == each for at, each in zip(begins, held, strict=True))
        found = ipc.open_file(pa.memory_map(str(path)))
        assert found.num_record_batches == len(sizes)
        for number, each in enumerate(held):
            batch = found.get_batch(number)
            batch.validate(full=True)
            assert bytes(batch.column(0).buffers()[1])[: len(each)] == each and begins[number] % ALIGN == 0


def test_it_is_imported_when_it_is_needed() -> None:
    """Whoever trains without checkpoints does not wait for it."""
    code = "import sys, ds_dynatrain as d; d.initialize; import ds_dynatrain.engine.dynatrain_engine"
    code += "; from ds_dynatrain.checkpoint import folder, reading, writing; assert 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
