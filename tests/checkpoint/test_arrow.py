"""The files as Arrow has them: alignment, what pyarrow reads of them, and bytes that are no such files."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_dynatrain.checkpoint.arrow import ALIGN, INT64, INTS, TEXT, UINT64, Column, read_table, table_bytes
from ds_dynatrain.checkpoint.elements import name_of, named, values_column
from ds_dynatrain.checkpoint.flatbuffer import FormatError, Scalar, Structs, Table, View, encode
from ds_dynatrain.space import Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds
from tests.checkpoint.worlds import save, state_of

SCHEMA = (Column("name", TEXT), Column("shape", INTS), Column("at", INT64), Column("digest", UINT64))
COLUMNS = {
    "name": ["a", "", "größe", "d" * 100],
    "shape": [[1, 2], [], [3], [-(2**62), 4, 5]],
    "at": [0, -1, 2**62, 7],
    "digest": [0, 1, 2**64 - 1, 2**63],
}


def plain(table: dict[str, object]) -> dict[str, object]:
    return {name: held.tolist() if isinstance(held, np.ndarray) else held for name, held in table.items()}


def test_a_table_comes_back() -> None:
    assert plain(read_table(table_bytes(SCHEMA, COLUMNS), SCHEMA)) == COLUMNS
    empty = {name: [] for name in COLUMNS}
    assert plain(read_table(table_bytes(SCHEMA, empty), SCHEMA)) == empty


def test_later_columns_are_left_out() -> None:
    later = (*SCHEMA, Column("later", TEXT))
    data = table_bytes(later, {**COLUMNS, "later": ["x"] * 4})
    assert plain(read_table(data, SCHEMA)) == COLUMNS


@pytest.mark.parametrize("cut", [0, 5, 60, 200, -1, -8, -100])
def test_cut_off(cut: int) -> None:
    with pytest.raises(FormatError):
        read_table(table_bytes(SCHEMA, COLUMNS)[:cut], SCHEMA)


def test_other_columns() -> None:
    with pytest.raises(FormatError, match="columns are not name, shape, at, digest"):
        read_table(table_bytes(SCHEMA[1:], COLUMNS), SCHEMA)
    with pytest.raises(FormatError, match="columns"):
        read_table(table_bytes((*SCHEMA[:3], Column("digest", INT64)), {**COLUMNS, "digest": [0] * 4}), SCHEMA)


def test_changed_bytes_are_an_error_or_another_table() -> None:
    """Never another exception, and never more memory than the file has."""
    data, draw = table_bytes(SCHEMA, COLUMNS), random.Random(5)
    refused = 0
    for _ in range(3000):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(data))] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        try:
            read_table(bytes(changed), SCHEMA)
        except FormatError:
            refused += 1
    assert refused > 300


def test_flatbuffers() -> None:
    rows = [(1, 2), (-3, 4)]
    made = Table(
        {0: Scalar("h", -7), 2: "text", 3: Structs("qq", rows), 5: [Table({0: "x"}), Table({})], 6: Scalar("q", 2**60)}
    )
    found = View.root(memoryview(encode(made)))
    assert (found.scalar(0, "h"), found.scalar(6, "q"), found.scalar(1, "i", 5)) == (-7, 2**60, 5)
    assert found.text(2) == "text" and found.structs(3, "qq") == rows and found.text(4) == ""
    assert [each.text(0) for each in found.tables(5)] == ["x", ""] and found.table(9) is None


def test_all_types_have_a_column() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e5m2):
        column = values_column(dtype)
        assert column.type.dtype.itemsize == dtype.itemsize and named(name_of(dtype)) is dtype
    for name in ("float33", "nn", "Tensor", "__name__", "half"):
        with pytest.raises(FormatError):
            named(name)


TENSORS = [LogicalTensor("a", (30, 50)), LogicalTensor("b", (7,)), LogicalTensor("frozen", (5,), -1)]


def written(folder: Path) -> tuple[VirtualParameterSpace, dict[str, torch.Tensor]]:
    layout = Layout(data=2, zero_stage=1)
    vps = VirtualParameterSpace(TENSORS, ZeroRules(), standard_kinds(2), layout, (0, 1))
    state = state_of(vps)
    save(folder, vps, layout, state)
    return vps, state


def test_values_are_aligned(tmp_path: Path) -> None:
    written(tmp_path)
    for file in tmp_path.glob("*.arrow"):
        data = file.read_bytes()
        assert data[:8] == b"ARROW1\0\0" and data[-6:] == b"ARROW1"
    layout = Layout(data=3, zero_stage=2)
    vps = VirtualParameterSpace(TENSORS, ZeroRules(), standard_kinds(4), layout, (0, 1, 2))
    (tmp_path / "other").mkdir()
    for row in save(tmp_path / "other", vps, layout, state_of(vps)):
        assert row.offset % ALIGN == 0


def test_pyarrow_reads_all_of_it(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    vps, state = written(tmp_path)
    for file in tmp_path.glob("*.arrow"):
        found = arrow.ipc.open_file(arrow.memory_map(str(file))).read_all()
        found.validate(full=True)
        if file.name == "manifest.arrow":
            continue
        assert found.schema.field(0).metadata[b"dtype"].decode() in file.name
    rows = arrow.ipc.open_file(arrow.memory_map(str(tmp_path / "manifest.arrow"))).read_all().to_pylist()
    for row in [each for each in rows if each["file"] and each["dtype"] == "float32"]:
        batches = arrow.ipc.open_file(arrow.memory_map(str(tmp_path / row["file"])))
        first = int(vps.bases[vps.line.index(row["tensor"])]) + row["start"]
        wanted = state[row["kind"]][first : first + row["length"]].tolist()
        assert wanted in [batches.get_batch(n).column(0).to_pylist() for n in range(batches.num_record_batches)]


def test_the_reader_of_the_docs(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    vps, state = written(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "checkpoint.md").read_text()
    script = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "read_tensor.py" in code)
    (tmp_path / "read_tensor.py").write_text(script)
    arguments = [sys.executable, "read_tensor.py", str(tmp_path), "a", "exp_avg"]
    printed = subprocess.run(arguments, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == str(state["exp_avg"][: 30 * 50].reshape(30, 50).numpy())
