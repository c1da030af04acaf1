"""CRC32s of DeepSpeed's and torch's files: one flipped bit in any value is found, whoever reads the file, and once."""

from __future__ import annotations

import random
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ds_dynatrain.checkpoint.crcs import Crcs, Member
from ds_dynatrain.checkpoint.manifest import Manifest
from ds_dynatrain.checkpoint.others import zips
from ds_dynatrain.checkpoint.others.recognize import told_at
from ds_dynatrain.checkpoint.others.zips import members_of
from ds_dynatrain.checkpoint.reading import Reader
from ds_dynatrain.errors import CheckpointDamaged
from tests.checkpoint.strangers import checkpoint
from tests.checkpoint.test_convert import TO
from tests.checkpoint.test_deepspeeds import stage_0, stage_2


def theirs(sort: str, path: Path) -> Path:
    """A checkpoint of DeepSpeed's, or of ours in another tool's format."""
    if sort in ("stage 0", "stage 2"):
        return (stage_0 if sort == "stage 0" else stage_2)(path / "theirs" / "step")
    ours, out = path / "ours", path / TO[sort]
    assert checkpoint("convert", stage_2(path / "theirs" / "step"), ours, "--to", "universal")[0] == 0
    (path / "new").mkdir()
    assert checkpoint("convert", ours, out, "--to", sort)[0] == 0
    return out / "step3" if sort == "deepspeed-universal" else out


@pytest.mark.parametrize("sort", ["stage 0", "stage 2", "deepspeed-universal", "dcp"])
def test_one_flipped_bit_of_any_value(tmp_path: Path, sort: str) -> None:
    path, draw = theirs(sort, tmp_path), random.Random(7)
    foreign = told_at(path)
    places = [part for archive in foreign.archives for part in members_of(path, archive) if "/data/" in part.name]
    assert {part.file for part in places} >= {row.file for row in foreign.manifest if row.file}
    for number, part in enumerate(draw.choices(places, k=12)):
        data = (path / part.file).read_bytes()
        changed, at = bytearray(data), draw.randrange(part.first, part.end)
        changed[at] ^= 1 << draw.randrange(8)
        (path / part.file).write_bytes(changed)
        code, text = checkpoint("convert", path, tmp_path / f"out{number}", "--to", "universal")
        assert code == 2, (part, at)
        if sort != "stage 0":  # which looks at the values of its masters before
            assert f"{part.file} is not what was saved: {part.name}" in text
        assert not list((tmp_path / f"out{number}").glob("step*"))
        (path / part.file).write_bytes(data)
    assert checkpoint("convert", path, tmp_path / "out", "--to", "universal")[0] == 0


def test_what_we_write_has_the_crcs_of_any_zip(tmp_path: Path) -> None:
    for file in theirs("deepspeed-universal", tmp_path).rglob("*.pt"):
        with zipfile.ZipFile(file) as held:
            assert held.testzip() is None and all(each.CRC for each in held.infolist()), file


def test_it_is_read_once(tmp_path: Path) -> None:
    """But for what nobody asks for: the module's weights of which there are masters, and what is no tensor."""
    path = stage_2(tmp_path / "step")
    foreign = told_at(path)
    crcs = Crcs(part for archive in foreign.archives for part in members_of(path, archive))
    with Reader(path, foreign.manifest, links=True, crcs=crcs) as reader:
        for row in sorted((row for row in foreign.manifest if row.file), key=lambda row: (row.file, row.offset)):
            reader.digest(row)
        before = reader.bytes_read
        reader.prove()
        rest = [part for part in crcs if part.end - part.first != 26 * 4 and not part.file.startswith("mp_")]
        others = [part for part in crcs if part.file.startswith("mp_")]
        most = sum(part.end - part.first for part in (*rest, *others))
        assert 0 < reader.bytes_read - before <= most


def test_files_without_crcs_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = stage_2(tmp_path / "step")
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    assert checkpoint("convert", path, tmp_path / "ours", "--to", "universal")[0] == 0
    assert checkpoint("convert", tmp_path / "dcp", tmp_path / "weights", "--to", "universal")[0] == 0
    assert checkpoint("verify", tmp_path / "ours")[0] == 0


def test_parts_in_one_place(tmp_path: Path) -> None:
    """Many entries for the same bytes would be read as often."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as made:
        made.writestr("x/data.pkl", b"\x80\x02}.")
        made.writestr("x/data/0", bytes(1000))
        again = made.infolist()[-1]
        made.filelist.append(zipfile.ZipInfo("x/data/1"))
        for name in ("header_offset", "file_size", "compress_size", "CRC"):
            setattr(made.filelist[-1], name, getattr(again, name))
    with pytest.raises(CheckpointDamaged, match="in one place"):
        members_of(tmp_path, ("x.pt", None))


def test_a_directory_of_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is small beside what is made of it."""
    torch.save({str(number): torch.ones(1) for number in range(100)}, tmp_path / "x.pt")
    assert len(members_of(tmp_path, ("x.pt", None))) > 100
    monkeypatch.setattr(zips, "MOST_OF_DIRECTORY", 5000)
    with pytest.raises(CheckpointDamaged, match="bytes at once"):
        members_of(tmp_path, ("x.pt", None))


def test_sums_of_reads_in_any_order(tmp_path: Path) -> None:
    data, draw = random.Random(1).randbytes(5000), random.Random(2)
    (tmp_path / "x").write_bytes(data)
    parts = [Member("x", str(low), low, high, number) for number, (low, high) in enumerate(((10, 900), (900, 4000)), 1)]
    right = [Member("x", part.name, part.first, part.end, zlib.crc32(data[part.first : part.end])) for part in parts]
    for _ in range(50):
        crcs = Crcs(right)
        for at in sorted(draw.sample(range(5000), 20), key=lambda at: (draw.random() < 0.2, at)):
            end = min(5000, at + draw.randrange(1, 800))
            crcs.saw("x", at, memoryview(data)[at:end])
        with Reader(tmp_path, Manifest({}), crcs=crcs) as reader:
            reader.prove()
            assert reader.bytes_read <= 3990
    with Reader(tmp_path, Manifest({}), crcs=Crcs(parts)) as reader, pytest.raises(CheckpointDamaged, match="10 in it"):
        reader.prove()
