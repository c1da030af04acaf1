"""`ds-dynatrain doctor`: what it says, in two forms, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from ds_dynatrain.adapters.versions import deepspeed_versions as versions
from ds_dynatrain.adapters.versions import torch_versions
from ds_dynatrain.cli import doctor as environment
from ds_dynatrain.cli.main import app
from ds_dynatrain.exact import trial as kernels
from ds_dynatrain.exact.adapters import refusals
from ds_dynatrain.exact.bits import squares
from ds_dynatrain.support import all_tables
from ds_dynatrain.support import walk as walk_module
from ds_dynatrain.support.row import Refusal, Row, Target, Verdict
from ds_dynatrain.transfer import weighing

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {
    "train_batch_size": 12,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "dynatrain": {"layout": {"data": 2, "zero_stage": 3}},
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU, whatever this machine has, no launch, and nothing compiled yet."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr(real_accelerator, "ds_accelerator", CPU_Accelerator())
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def written(folder: Path, text: object) -> Path:
    path = folder / "config.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def told(path: Path, *options: object) -> dict[str, Any]:
    """The JSON report; its verdict agrees with the exit code."""
    result = doctor(path, "--json", *options)
    said: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if said["would_start"] else 1)
    return said


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom ds_dynatrain.cli.main import app\n"
        "try: app(['doctor', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'deepspeed', 'scipy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_this_machine() -> None:
    result = doctor()
    assert result.exit_code == 0, result.output
    for words in ("ds_dynatrain", "DeepSpeed", "torch", "Python", "names", "accelerator", "C++ compiler", "digests"):
        assert words in result.stdout
    assert "a job would start" in result.stdout


def test_versions_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    oldest, newest = environment.OLDEST_PYTHON, environment.NEWEST_PYTHON
    assert f'requires-python = ">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"' in project
    assert f'"torch>={".".join(map(str, environment.OLDEST_TORCH))}"' in project
    assert ".".join(map(str, environment.OLDEST_TORCH)) == torch_versions.OLDEST
    assert environment.TESTED_TORCH == torch_versions.TESTED
    assert (
        tuple(version for series in versions.SERIES for version in reversed(series.tested))
        == environment.TESTED_DEEPSPEED
    )
    assert 'ds-dynatrain = "ds_dynatrain.cli.main:main"' in project


def test_a_file_of_hugging_face(tmp_path: Path) -> None:
    """The usual ZeRO-3 file, whose values Trainer fills in."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {**dict.fromkeys((*sizes, "gradient_clipping"), "auto"), "bf16": {"enabled": "auto"}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "torch_adam": True}}
    config["zero_optimization"] = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    said = told(written(tmp_path, config))
    (note,) = [each for each in said["config"]["notes"] if "filled in by Hugging Face" in each]
    assert said["would_start"] and all(name in note for name in sizes)


BATCHES = [({"train_batch_size": 12}, "12 samples a step, with any"), ({}, "an elastic launch refuses this file")]


@pytest.mark.parametrize(("size", "words"), BATCHES)
def test_the_global_batch_is_named(tmp_path: Path, size: dict[str, int], words: str) -> None:
    config = {key: value for key, value in GOOD.items() if key != "train_batch_size"}
    said = told(written(tmp_path, {**config, **(size or {"train_micro_batch_size_per_gpu": 3})}))
    assert said["would_start"] and any(words in note for note in said["config"]["notes"])


def test_a_good_file(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    result = doctor(path)
    assert result.exit_code == 0, result.output
    assert "would start" in result.stdout.splitlines()[-1]
    said = told(path)
    assert said["config"]["layout"]["data"] == 2 and said["config"]["layout"]["zero_stage"] == 3
    assert {key["key"]: key["verdict"] for key in said["config"]["keys"]}["train_batch_size"] == "works"
    assert set(said["config"]["stages"].values()) == {""} and said["config"]["problems"] == []


def test_a_refused_file(tmp_path: Path) -> None:
    zero = {"stage": 1, "round_robin_gradient": True, "elastic_checkpoint": True, "zero_hpz_partition_size": 1}
    path = written(tmp_path, {**GOOD, "zero_optimization": zero})
    result = doctor(path)
    assert result.exit_code == 1
    assert "would be refused" in result.stdout.splitlines()[-1]
    keys = {key["key"]: key for key in told(path)["config"]["keys"]}
    assert keys["zero_optimization.elastic_checkpoint"]["verdict"] == "refused at start"
    assert keys["zero_optimization.elastic_checkpoint"]["instead"]
    assert "did you mean 'zero_optimization.round_robin" in keys["zero_optimization.round_robin_gradient"]["instead"]
    assert keys["zero_optimization.zero_hpz_partition_size"]["verdict"] == "off"


def test_no_block(tmp_path: Path) -> None:
    path = written(tmp_path, {key: value for key, value in GOOD.items() if key != "dynatrain"})
    said = told(path, "--processes", 4)
    assert said["config"]["layout"]["data"] == 4 and said["would_start"]
    assert any("no dynatrain block" in note for note in said["config"]["notes"])


def test_the_size_of_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, GOOD)
    assert "the launch has 1 processes" in told(path, "--processes", 1)["config"]["problems"][0]
    monkeypatch.setenv("WORLD_SIZE", "1")
    said = told(path)
    assert "the launch has 1 processes" in said["config"]["problems"][0]
    assert said["variables"] == {"WORLD_SIZE": "1"}


def test_a_bad_block(tmp_path: Path) -> None:
    said = told(written(tmp_path, {**GOOD, "dynatrain": {"timeout_second": 3}}))
    assert "dynatrain.timeout_second: unknown key; did you mean 'timeout_seconds'" in said["config"]["problems"][0]


@pytest.mark.parametrize("stage", [7, "two", True, None])
def test_a_bad_stage(tmp_path: Path, stage: object) -> None:
    block = {**GOOD, "dynatrain": {}, "zero_optimization": {"stage": stage}}
    assert "stage" in told(written(tmp_path, block))["config"]["problems"][0]


def test_what_deepspeed_itself_refuses(tmp_path: Path) -> None:
    path = written(tmp_path, {**GOOD, "zero_optimization": {"stage": 1, "reduce_bucket_size": -1}})
    assert "reduce_bucket_size" in told(path)["config"]["problems"][0]
    sizes = {**GOOD, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 3}
    assert "12 != 3 samples x 3 accumulation steps x data=2" in told(written(tmp_path, sizes))["config"]["problems"][0]
    small = {**GOOD, "train_batch_size": 1}
    assert "data=2 ranks share a train_batch_size of 1" in told(written(tmp_path, small))["config"]["problems"][0]


def test_a_stage_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_stage_0(target: Target) -> Refusal | None:
        return Refusal("not there", "use 1") if target.layout.zero_stage == 0 else None

    row = Row("prescale_gradients", Verdict.NOTE, "not at stage 0", at_layout=no_stage_0)
    monkeypatch.setitem(walk_module.CONFIG_ROWS, "prescale_gradients", (row,))  # type: ignore[arg-type]
    said = told(written(tmp_path, {**GOOD, "prescale_gradients": True}))
    assert said["would_start"] and "use 1" in said["config"]["stages"]["0"] and said["config"]["stages"]["1"] == ""
    start = {**GOOD, "prescale_gradients": True, "dynatrain": {"layout": {"data": 2, "zero_stage": 0}}}
    said = told(written(tmp_path, start))
    assert not said["would_start"] and "the first layout" in said["config"]["problems"][0]


@pytest.mark.parametrize(
    ("name", "stages", "words"),
    [
        ("Adagrad", {"0"}, "DeepSpeed replaces it"),
        ("SGD", {"0"}, "zero_allow_untested_optimizer"),
        ("Muon", {"0", "1", "2"}, "reduce_scatter"),
        ("AdamW", {"0", "1", "2", "3"}, ""),
    ],
)
def test_stages_of_an_optimizer(tmp_path: Path, name: str, stages: set[str], words: str) -> None:
    block = {"optimizer": {"type": name, "params": {"lr": 1e-3, "torch_adam": True}}}
    start = {**GOOD, **block, "dynatrain": {"layout": {"data": 2, "zero_stage": 0}}}
    found = told(written(tmp_path, start))["config"]["stages"]
    assert {stage for stage, why in found.items() if not why} == stages
    assert words in found["3"]
    said = told(written(tmp_path, {**GOOD, **block}))
    assert said["would_start"] == ("3" in stages)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "neither a readable file nor JSON"),
        ("[1, 2]", "expected an object of keys"),
        ('{"train_batch_size": 1, "train_batch_size": 2}', "stands twice"),
        (None, "no such file"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "nothing.json" if text is None else written(tmp_path, text)
    result = doctor(path)
    assert result.exit_code == 2
    assert words in result.stderr and "Traceback" not in result.output


def test_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was never tried on such hardware is said; a job may start."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr(CPU_Accelerator, "device_name", lambda self, index=None: "cuda")
    result = doctor("--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)["environment"]}
    assert result.exit_code == 0 and checks["accelerator"]["ok"] is None
    assert "never ran" in checks["accelerator"]["note"] and "docs/gpu.md" in checks["accelerator"]["note"]
    lines = doctor().stdout.splitlines()
    assert lines[0].startswith("status") and "on GPUs" in " ".join(" ".join(lines[:5]).split())


def test_a_torch_that_is_built_for_gpus_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    result = doctor("--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)["environment"]}
    assert result.exit_code == 0 and "CUDA 13.0 too" in checks["accelerator"]["note"]


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds up torch's stores: said with what to set, and no reason not to start."""

    def late(address: object, flags: int) -> tuple[str, str]:
        time.sleep(environment.LONGEST_LOOK_UP_SECONDS + 0.1)
        raise OSError("no answer")

    monkeypatch.setattr(environment, "LOOK_UPS", 1)
    monkeypatch.setattr("socket.getnameinfo", late)
    result = doctor("--json")
    check = {check["name"]: check for check in json.loads(result.stdout)["environment"]}["name server"]
    assert result.exit_code == 0 and check["ok"] is None
    assert "RES_OPTIONS" in check["note"]


def test_readme_says_the_status_in_the_same_words() -> None:
    words = " ".join((ROOT / "README.md").read_text().replace("\n>", "\n").split())
    assert environment.STATUS in words[:1500]


def test_deepspeed_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The support table speaks without it."""
    monkeypatch.setitem(sys.modules, "ds_dynatrain.adapters", None)
    monkeypatch.delattr(sys.modules["ds_dynatrain"], "adapters", raising=False)
    said = told(written(tmp_path, GOOD))
    checks = {check["name"]: check for check in said["environment"]}
    assert checks["names"]["ok"] is False and "ModuleNotFoundError" in checks["names"]["note"]
    assert said["config"]["keys"] and not said["config"]["problems"] and not said["would_start"]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = doctor("--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)["environment"]}
    assert checks["C++ compiler"]["value"] == "no no-such-compiler" and result.exit_code == 0


def test_a_compilation_that_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "FileBaton", object, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()

    def note() -> str:
        result = doctor("--json")
        (check,) = [check for check in json.loads(result.stdout)["environment"] if check["name"] == "lock"]
        assert result.exit_code == 1 and check["value"] == str(lock)
        return str(check["note"])

    with lock.open("w"):
        assert doctor().exit_code == 0  # somebody is compiling now
    assert "begun 0 minutes ago was broken off, unless another machine" in note()
    os.utime(lock, (time.time() - 3600,) * 2)
    assert "begun 60 minutes ago was broken off, and every start" in note()


def test_lock_files_of_newer_torch_hold_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since 2.14 torch leaves the file there after every compilation, and locks it by the kernel."""
    from torch.utils import cpp_extension

    monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)
    assert doctor().exit_code == 0


def test_the_whole_table() -> None:
    result = doctor("--table")
    assert result.exit_code == 0
    assert all(f"## {name}\n" in result.stdout for name in all_tables())


# ---- exact jobs ------------------------------------------------------------------------------------------------------


EXACT = {
    **GOOD,
    "train_micro_batch_size_per_gpu": 3,
    "dynatrain": {"layout": {"data": 2, "zero_stage": 3}, "exact": {}},
}


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set; as MKL reads it when Python starts, what kernels do is another matter here."""
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    trial = kernels.Trial((), "0123456789abcdef")
    monkeypatch.setattr(kernels, "try_kernels", lambda: trial)


def exact_checks(*arguments: object) -> dict[str, dict[str, Any]]:
    """Those of the JSON, by name; its verdict agrees with the exit code."""
    result = doctor("--exact", "--json", *arguments)
    said = json.loads(result.stdout)["exact"]
    assert result.exit_code == (0 if said["would_be"] else 1)
    return {check["name"]: check for check in said["checks"]}


@pytest.mark.usefixtures("rounding")
def test_an_exact_job() -> None:
    result = doctor("--exact")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-2:] == ["a job would start", "it would be exact"]
    said = json.loads(doctor("--exact", "--json").stdout)["exact"]
    assert (said["machine"], said["bits"]) == (refusals.machine(), "0123456789abcdef")
    assert set(said["machine"]) <= set(exact_checks())
    assert "exact" not in doctor().stdout and json.loads(doctor("--json").stdout)["exact"] is None


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(
    ("name", "words"), [("MKL_CBWR", "MKL_CBWR=COMPATIBLE"), ("OMP_NUM_THREADS", "export OMP_NUM")]
)
def test_what_is_not_set(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.delenv(name)
    check = exact_checks()[name]
    assert (check["value"], check["ok"]) == ("not set", False) and words in check["note"]
    assert doctor("--exact").stdout.splitlines()[-1] == f"it would not be exact: {name}"


@pytest.mark.usefixtures("rounding")
def test_kernels_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "try_kernels", lambda: kernels.Trial(("products",), ""))
    check = exact_checks()["kernels"]
    assert not check["ok"] and check["note"].startswith("products: other bits where operands lie elsewhere")
    monkeypatch.setattr(squares, "in_numpy", lambda *arguments: (0, 0))
    if exact_checks()["sums"]["value"] != "in numpy":
        assert exact_checks()["sums"]["note"].startswith("squares: the C module and numpy differ")
    monkeypatch.setattr(weighing, "weigh", None)
    assert exact_checks()["sums"]["ok"] is None


def test_kernels_are_tried() -> None:
    """What follows the place of its operands is seen, and other bits make another hash."""

    def still(place: int) -> Iterator[torch.Tensor]:
        yield torch.ones(3)

    def moving(place: int) -> Iterator[torch.Tensor]:
        yield torch.tensor([float(place == kernels.PLACES[-1])])

    one, other = (kernels.try_kernels({"still": still, **more}) for more in ({}, {"moving": moving}))
    assert (one.moving, other.moving) == ((), ("moving",)) and one.bits != other.bits
    assert kernels.try_kernels().bits == kernels.try_kernels().bits
    assert {"functions", "updates"}.isdisjoint(kernels.try_kernels().moving)


@pytest.mark.usefixtures("rounding")
def test_the_configuration_of_an_exact_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = doctor(written(tmp_path, EXACT))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "it would be exact"
    overlapping = {**EXACT, "zero_optimization": {"stage": 1, "overlap_comm": True}}
    said = told(written(tmp_path, overlapping))
    assert "exact: zero_optimization.overlap_comm" in said["config"]["problems"][0]
    said = told(written(tmp_path, {**EXACT, "train_micro_batch_size_per_gpu": None}))
    assert "a leaf is train_micro_batch_size_per_gpu" in said["config"]["problems"][0]
    monkeypatch.delenv("MKL_CBWR")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert "exact: MKL_CBWR=" in told(written(tmp_path, EXACT))["config"]["problems"][0]


@pytest.mark.full
def test_a_switch_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    result = doctor("--try")
    assert result.exit_code == 0, result.stdout
    assert re.search(
        r"a switch +works +ok +2 processes on cpu, data=2 zero_stage=1 -> data=2 zero_stage=3 in", result.stdout
    )


def test_a_switch_that_fails_is_a_job_that_would_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(
        "#!/bin/sh\nfor word; do case $word in --log-dir=*) logs=${word#*=};; esac; done\n"
        "mkdir -p $logs/0; echo 'ValueError: no shared memory' > $logs/0/stderr.log; exit 1\n"
    )
    torchrun.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(torchrun))
    result = doctor("--try")
    assert result.exit_code == 1 and "ValueError: no shared memory" in result.stdout
    assert "would be refused: a switch" in result.stdout
