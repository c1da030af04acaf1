"""DeepSpeed's folders without DeepSpeed or a model: what is in them comes out, and lies in them are errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from ds_dynatrain.checkpoint import folder
from ds_dynatrain.checkpoint.others.recognize import told_at
from ds_dynatrain.checkpoint.reading import Reader, whole
from ds_dynatrain.checkpoint.record import Saved
from ds_dynatrain.cli.main import app
from ds_dynatrain.errors import CheckpointError

SHAPES = {"a": (5, 7), "b": (3,), "c": (2, 2, 3)}
NUMEL = 35 + 3 + 12
STATE = {kind: torch.randn(NUMEL, generator=torch.Generator().manual_seed(3)) for kind in ("fp32", "exp_avg")}
FROZEN = torch.arange(4.0).to(torch.bfloat16)
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


class Foreign:
    """A class that no list allows."""


def stage_2(path: Path, **more: Any) -> Path:
    """As two ranks save in ZeRO stage 2: equal parts of 52, of which the last two are padding and left out."""
    path.mkdir(parents=True)
    model = {
        "module": {"frozen": FROZEN, "seen": torch.tensor(9)},
        "buffer_names": ["seen"],
        "param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}],
        "frozen_param_shapes": {"frozen": FROZEN.shape},
        "shared_params": {},
        "ds_config": {"bf16": {"enabled": True}},
        **{"global_steps": 3, "global_samples": 36, "skipped_steps": 0, "dp_world_size": 2, "lr_scheduler": {"at": 3}},
    }
    torch.save({**model, **more}, path / MODEL)
    for rank in range(2):
        part = {kind: held.split(26)[rank].clone() for kind, held in STATE.items()}
        base = {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": part["exp_avg"]}},
            "param_groups": [{"lr": 0.5, "betas": (0.9, 0.95), "params": [0]}],
        }
        optimizer = {"zero_stage": 2, "base_optimizer_state": base, "single_partition_of_fp32_groups": [part["fp32"]]}
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}}, path / OPTIMIZER.format(rank))
    return path


def stage_0(path: Path) -> Path:
    """As DeepSpeed saves fp32 without ZeRO: the optimizer is torch's own."""
    path.mkdir(parents=True)
    starts, parts = [0, 35, 38], list[dict[str, Any]]()
    for begin, shape in zip(starts, SHAPES.values(), strict=True):
        run = slice(begin, begin + torch.Size(shape).numel())
        parts.append({kind: held[run].view(shape) for kind, held in STATE.items()})
    state = {number: {"step": torch.tensor(3.0), "exp_avg": part["exp_avg"]} for number, part in enumerate(parts)}
    model = {
        "module": {name: part["fp32"].clone() for name, part in zip(SHAPES, parts, strict=True)},
        "optimizer": {"state": state, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.95), "params": [0, 1, 2]}]},
        **{"global_steps": 3, "global_samples": 36, "skipped_steps": 0, "dp_world_size": 2, "buffer_names": []},
    }
    torch.save(model, path / MODEL)
    return path


def converted(path: Path, out: Path, *options: str) -> str:
    """What the command says; AssertionError unless it ends well or in exit code 2."""
    found = CliRunner().invoke(app, ["checkpoint", "convert", str(path), str(out), "--to", "universal", *options])
    assert found.exit_code in (0, 2) and "Traceback" not in found.output, found.output
    return found.output if found.exit_code else ""


def check(out: Path) -> Saved:
    saved = Saved.open(out / "step3")
    assert folder.latest(out) == "step3" and CliRunner().invoke(app, ["checkpoint", "verify", str(out)]).exit_code == 0
    assert saved.record.carry["scalars"] == {"step": {"0": 3.0, "1": 3.0, "2": 3.0}}
    assert saved.record.carry["groups"] == [{"lr": 0.5, "betas": {"__tuple__": [0.9, 0.95]}}]
    begin = 0
    with Reader(saved.path, saved.manifest) as reader:
        for tensor in saved.record.logical_tensors()[:3]:
            assert tensor.shape == SHAPES[tensor.name]
            for kind, there in (("master", "fp32"), ("exp_avg", "exp_avg")):
                assert torch.equal(whole(reader, tensor, kind).flatten(), STATE[there][begin : begin + tensor.numel])
            begin += tensor.numel
    return saved


def test_stage_2_and_by_way_of_their_universal_format(tmp_path: Path) -> None:
    assert not converted(stage_2(tmp_path / "theirs"), tmp_path / "ours")
    first = check(tmp_path / "ours")
    assert first.record.logical_tensors()[3].name == "frozen" and first.record.carry["counters"]["global_samples"] == 36
    command = ["checkpoint", "convert", str(tmp_path / "ours"), str(tmp_path / "their"), "--to", "deepspeed-universal"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert not converted(tmp_path / "their", tmp_path / "again")
    again = check(tmp_path / "again")
    for name in ("tensors", "kinds", "step"):
        assert getattr(again.record, name) == getattr(first.record, name)
    for key in first.manifest.rows:
        assert again.manifest.digest(*key) == first.manifest.digest(*key), key


def test_by_way_of_torchs_format(tmp_path: Path) -> None:
    assert not converted(stage_2(tmp_path / "theirs"), tmp_path / "ours")
    command = ["checkpoint", "convert", str(tmp_path / "ours"), str(tmp_path / "dcp"), "--to", "dcp"]
    assert CliRunner().invoke(app, command).exit_code == 0
    names = {"model.c": "fp32", "optim.state.c.exp_avg": "exp_avg"}
    found = {**{name: torch.empty(SHAPES["c"]) for name in names}, "optim.param_groups.c.lr": 0.0, "step": 0}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(found[name].flatten(), STATE[kind][38:]) for name, kind in names.items())
    assert found["optim.param_groups.c.lr"] == 0.5 and found["step"] == 3
    assert not converted(tmp_path / "dcp", tmp_path / "again")
    first, again = check(tmp_path / "ours"), check(tmp_path / "again")
    assert again.record.tensors == first.record.tensors
    for key in first.manifest.rows:
        if key[1] != "rest" and (key[0] == "frozen" or key[1] != "weight"):
            assert again.manifest.digest(*key) == first.manifest.digest(*key), key


def test_stage_0_of_one_group(tmp_path: Path) -> None:
    assert not converted(stage_0(tmp_path / "theirs"), tmp_path / "ours")
    check(tmp_path / "ours")
    tree = torch.load(tmp_path / "theirs" / MODEL)
    tree["optimizer"]["state"][2]["exp_avg"] = torch.zeros(9)
    torch.save(tree, tmp_path / "theirs" / MODEL)
    assert "does not say which of its optimizer's states" in converted(tmp_path / "theirs", tmp_path / "wrong")


def test_trust_pickle_is_asked_for(tmp_path: Path) -> None:
    stage_2(tmp_path / "theirs", mine=Foreign())
    assert "--trust-pickle" in converted(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    assert not converted(tmp_path / "theirs", tmp_path / "ours", "--trust-pickle")
    check(tmp_path / "ours")


LIES: list[Callable[[dict[str, Any]], object]] = [
    lambda said: said.update(dp_world_size=3),
    lambda said: said.update(dp_world_size="many"),
    lambda said: said.update(param_shapes=3),
    lambda said: said.update(param_shapes=[{"a": torch.Size([5, 7])}, {"b": torch.Size([3])}]),
    lambda said: said["param_shapes"][0].update(a=torch.Size([1 << 40, 1 << 15])),
    lambda said: said["param_shapes"][0].update(a="large"),
    lambda said: said["param_shapes"][0].update(d=torch.Size([9])),
    lambda said: said["param_shapes"][0].update({3: torch.Size([1])}),
    lambda said: said["frozen_param_shapes"].update(frozen=torch.Size([5])),
    lambda said: said["frozen_param_shapes"].update(a=torch.Size([4])),
    lambda said: said.pop("module"),
    lambda said: said["module"].pop("frozen"),
    lambda said: said["module"].update(frozen=4),
    lambda said: said.update(global_steps="three"),
    lambda said: said.update(buffer_names=3),
    lambda said: said["module"].update(frozen=FROZEN.expand(1 << 10, 4)),
    lambda said: said["module"].update(seen=torch.zeros(1).expand(1 << 40)),
    lambda said: said.update(lr_scheduler={"at": torch.float16}),
]


@pytest.mark.parametrize("universal", [False, True])
def test_lies_are_errors(tmp_path: Path, universal: bool) -> None:
    source = stage_2(tmp_path / "theirs")
    if universal:
        assert not converted(source, tmp_path / "ours")
        command = ["checkpoint", "convert", str(tmp_path / "ours"), str(tmp_path / "u"), "--to", "deepspeed-universal"]
        assert CliRunner().invoke(app, command).exit_code == 0
        source = tmp_path / "u" / "step3"
        tree = torch.load(source / MODEL)
        torch.save({**torch.load(tmp_path / "theirs" / MODEL), "module": tree["module"]}, source / MODEL)
    good = torch.load(source / MODEL)
    for number, lie in enumerate(LIES):
        said = torch.load(source / MODEL)
        lie(said)
        torch.save(said, source / MODEL)
        error = converted(source, tmp_path / f"out{number}")
        harmless = universal and "dp_world_size" in said and said["dp_world_size"] != 2
        assert error or harmless, number
        assert error == "" or not list((tmp_path / f"out{number}").glob("*")), "nothing is left of it"
        torch.save(good, source / MODEL)
    assert not converted(source, tmp_path / "good")


def test_files_that_are_missing_or_cut_off(tmp_path: Path) -> None:
    source = stage_2(tmp_path / "theirs")
    for number, name in enumerate((MODEL, OPTIMIZER.format(0), OPTIMIZER.format(1))):
        for share in (None, 0.0, 0.5, 0.98):
            spoilt = tmp_path / f"{number}-{share}"
            shutil.copytree(source, spoilt)
            data = (spoilt / name).read_bytes()
            (spoilt / name).unlink()
            if share is not None:
                (spoilt / name).write_bytes(data[: int(share * len(data))])
            with pytest.raises(CheckpointError):
                told_at(spoilt)
