"""`ds-dynatrain balance`: what it says, in two forms, what it refuses by name, and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ds_dynatrain.balance.deal import Deal
from ds_dynatrain.balance.profile import Profile
from ds_dynatrain.balance.step_time import step_time
from ds_dynatrain.cli.main import app
from ds_dynatrain.space.layout import Layout
from tests.balance.profiles import profile

ROOT = Path(__file__).parents[2]


def balance(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["balance", *map(str, arguments)])


def told(*arguments: object) -> dict[str, Any]:
    result = balance(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    said: dict[str, Any] = json.loads(result.stdout)
    return said


def refused(*arguments: object) -> str:
    result = balance(*arguments)
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.startswith("ds-dynatrain balance: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def measured() -> Profile:
    """Later layers take longer, as where tokens leave from the end."""
    return profile([0.01 * (1 + 0.2 * place) for place in range(12)], batch=32, micro=2)


@pytest.fixture
def file(measured: Profile, tmp_path: Path) -> Path:
    measured.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def changed(file: Path, **values: object) -> Path:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return file


def test_boundaries_for_four_stages(file: Path, measured: Profile) -> None:
    said = told(file, "--stages", 4, "--memory", "80e9")
    assert said["present"]["layout"]["boundaries"] == [0, 3, 6, 9, 12]
    assert said["proposed"]["layout"]["boundaries"] == [0, 5, 8, 10, 12]
    for each in (said["present"], said["proposed"]):
        layout = Layout.from_dict(each["layout"])
        predicted = step_time(measured, layout, Deal.of(measured, layout))
        assert each["step_ms"] == predicted.step_ms and each["bottleneck"] == predicted.bottleneck
        assert each["efficiency"] == predicted.efficiency and len(each["stage_bytes"]) == 4
    assert said["choices"][0]["layout"] == said["proposed"]["layout"]


def test_experts_that_were_measured(file: Path) -> None:
    experts = {"name": "mlp", "layer": 3, "forward_seconds": 0.01, "backward_seconds": 0.02}
    changed(file, experts=[{**experts, "tokens": [0.4, 0.3, 0.2, 0.1], "rows": [[0, 1], [2, 3]]}])
    assert told(file)["experts"] == [{"name": "mlp", "present": 1.4, "proposed": 1.0, "bound": 1.0}]
    assert "experts of mlp: most tokens ÷ mean 1.400 now, 1.000 after swaps" in balance(file).stdout


def test_for_a_reader(file: Path) -> None:
    result = balance(file, "--stages", 4, "--memory", "80e9")
    assert result.exit_code == 0
    for text in ("0,3,6,9,12", "0,5,8,10,12", "stage 3", "block.10 to block.11", "1.26 × as fast as uniform", "0.79"):
        assert text in result.stdout
    assert result.stdout.endswith("Nothing has been changed.\n")


def test_the_present_boundaries(file: Path) -> None:
    said = told(file, "--stages", 2, "--members", 5, "--present", "0,5,12")
    assert said["present"]["layout"]["boundaries"] == [0, 5, 12] and said["present"]["layout"]["data"] == 2
    assert "× as fast as present" in balance(file, "--stages", 2, "--present", "0,5,12").stdout
    assert "more than --memory" in balance(file, "--stages", 2, "--present", "0,11,12", "--memory", 40000).stdout


def test_any_number_of_stages(file: Path) -> None:
    said = told(file, "--members", 6, "--memory", 15000)
    assert said["present"] is None
    assert len({each["layout"]["pipe"] for each in said["choices"]}) > 1
    assert all(each["layout"]["pipe"] * each["layout"]["data"] <= 6 for each in said["choices"])
    assert "as fast as" not in balance(file, "--members", 6, "--memory", 15000).stdout


def test_micro_batches_and_links(file: Path) -> None:
    free = told(file, "--stages", 4, "--micro-batches", 32)
    assert free["proposed"]["micro_batches"] == 32
    slow = told(file, "--stages", 4, "--micro-batches", 32, "--bytes-per-second", 1000, "--latency-seconds", 0.01)
    assert slow["proposed"]["step_ms"]["waiting"] > free["proposed"]["step_ms"]["waiting"]
    for stages in (("--stages", 1), ()):
        whole = told(file, *stages, "--members", 3, "--zero-stage", 3)["proposed"]["layout"]
        assert (whole["zero_stage"], whole["pipe"], whole["data"]) == (3, 1, 3)


def test_speeds_of_the_members(file: Path) -> None:
    changed(file, speeds=[1.0, 0.5, 1.0, 1.0])
    assert told(file, "--stages", 4)["proposed"]["layout"]["boundaries"][-2] == 11
    assert "--members 3: the profile has the speeds of 4 members" in refused(file, "--members", 3)


def test_bad_profiles(file: Path) -> None:
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    assert f"{file}: no JSON, or the end is missing" in refused(file, "--stages", 4)
    file.write_text(text.replace('"forward_seconds": 0.01,', '"forward_seconds": NaN,', 1))
    assert "layer 'block.0': forward_seconds is nan: Input should be a finite number" in refused(file, "--stages", 4)
    file.write_text(text)
    assert "version is 7: Input should be 1" in refused(changed(file, version=7), "--stages", 4)
    assert "nothing.json" in refused(file.parent / "nothing.json", "--stages", 4)


def test_what_does_not_fit(file: Path) -> None:
    assert "12 layers cannot be cut into 14 stages" in refused(file, "--stages", 14)
    tight = refused(file, "--stages", 4, "--memory", 1500)
    assert "'block.0' (layer 0) takes 3000 bytes at the least, and no stage has more than 1500" in tight
    assert "--stages 4 and 3 members: each stage needs one" in refused(file, "--stages", 4, "--members", 3)
    assert "pipelines have ZeRO stages 0 and 1" in refused(file, "--stages", 4, "--zero-stage", 2)
    assert "--present 0,x: give boundaries" in refused(file, "--stages", 4, "--present", "0,x")
    assert "end with 12" in refused(file, "--stages", 4, "--present", "0,3,6,9,13")
    assert "--memory nan" in refused(file, "--stages", 4, "--memory", "nan")
    assert "deals out 32 samples in 33 micro-batches" in refused(file, "--stages", 4, "--micro-batches", 33)
    assert "bytes per second" in refused(file, "--stages", 4, "--bytes-per-second", 0)


def test_neither_torch_nor_deepspeed_is_imported(file: Path) -> None:
    code = (
        "import sys\nfrom ds_dynatrain.cli.main import app\n"
        f"app(['balance', {str(file)!r}, '--stages', '4', '--memory', '80e9'], standalone_mode=False)\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "Nothing has been changed." in ran.stdout


def test_a_stage_without_anything_to_train(file: Path) -> None:
    """Eight frozen layers: a stage of them alone is proposed, and takes no backward pass."""
    said = json.loads(file.read_text())
    for layer in said["layers"][:8]:
        layer |= {"trained": False, "backward_seconds": 0.0, "kind_bytes": {"weight": 200}}
    changed(file, layers=said["layers"])
    found, before = told(file, "--stages", 4), told(file, "--stages", 4, "--present", "0,9,10,11,12")
    assert found["proposed"]["layout"]["boundaries"][1] <= 8
    assert found["proposed"]["step_ms"]["total"] < before["present"]["step_ms"]["total"]


def test_present_boundaries_with_as_many_data_ranks_as_can_be_trained(file: Path) -> None:
    """32 samples in micro-batches of 2 go to 3 data ranks, too: to 6, 5 and 5 micro-batches."""
    present = told(file, "--stages", 2, "--members", 7, "--present", "0,5,12")["present"]
    assert present["layout"]["data"] == 3 and present["micro_batches"] == 6


def test_layers_that_take_no_time(file: Path) -> None:
    said = json.loads(file.read_text())
    for layer in said["layers"]:
        layer |= {"forward_seconds": 0.0, "backward_seconds": 0.0}
    assert "nothing takes any time" in balance(changed(file, layers=said["layers"]), "--stages", 3).stdout
