"""CRC32s of DeepSpeed's and torch's files: one flipped bit in any value is found, whoever reads the file."""

from __future__ import annotations

import random
import re
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ds_dynatrain.checkpoint.others.recognize import told_at
from ds_dynatrain.checkpoint.others.torch_files import Archive, check_crcs
from ds_dynatrain.errors import CheckpointDamaged
from tests.checkpoint.strangers import checkpoint
from tests.checkpoint.test_convert import TO
from tests.checkpoint.test_deepspeeds import stage_0, stage_2
from tools.specimens import members_of


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
    places = [
        part for archive in foreign.archives for part in members_of(path, archive) if part.name.startswith("data/")
    ]
    assert {part.file for part in places} >= {row.file for row in foreign.manifest if row.file}
    for number, part in enumerate(draw.choices(places, k=12)):
        data = (path / part.file).read_bytes()
        changed, at = bytearray(data), draw.randrange(part.first, part.end)
        changed[at] ^= 1 << draw.randrange(8)
        (path / part.file).write_bytes(changed)
        code, text = checkpoint("convert", path, tmp_path / f"out{number}", "--to", "universal")
        assert code == 2, (part, at)
        if sort != "stage 0":  # which looks at the values of its masters before
            assert re.search(rf"{re.escape(part.file)} is not what was saved: \S+/{part.name} in it", text), text
        assert not list((tmp_path / f"out{number}").glob("step*"))
        (path / part.file).write_bytes(data)
    assert checkpoint("convert", path, tmp_path / "out", "--to", "universal")[0] == 0


def test_what_we_write_has_the_crcs_of_any_zip(tmp_path: Path) -> None:
    for file in theirs("deepspeed-universal", tmp_path).rglob("*.pt"):
        with zipfile.ZipFile(file) as held:
            assert held.testzip() is None and all(each.CRC for each in held.infolist()), file


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
        check_crcs(tmp_path, [("x.pt", None)])


def test_several_share_the_reading(tmp_path: Path) -> None:
    """Each member of a zip is one's to check, whichever file it is in."""
    for name in ("x", "y"):
        torch.save({str(number): torch.full((100,), number) for number in range(5)}, tmp_path / f"{name}.pt")
    archives: list[Archive] = [("x.pt", None), ("y.pt", None)]
    part = next(part for part in members_of(tmp_path, archives[1]) if part.name == "data/3")
    data = bytearray((tmp_path / "y.pt").read_bytes())
    data[part.first] ^= 1
    (tmp_path / "y.pt").write_bytes(data)
    found = list[int]()
    for place in range(3):
        try:
            check_crcs(tmp_path, archives, place, 3)
        except CheckpointDamaged as error:
            assert re.match(r"y\.pt is not what was saved: y/data/3 in it, Bad CRC-32", str(error))
            found.append(place)
    assert len(found) == 1
