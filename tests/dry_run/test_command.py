"""`ds-dynatrain plan`: what it says, in its forms, its errors and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ds_dynatrain.cli.main import app
from ds_dynatrain.dry_run.answer import DryRunAnswer

ROOT = Path(__file__).parents[2]
CLUSTER = str(ROOT / "examples/clusters/a800-16x8.toml")
SCHEMA = ROOT / "docs/reference/plan.schema.json"
TINY = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
TINY |= {"num_attention_heads": 8, "num_key_value_heads": 4}


def plan(*options: str, model: str = "llama-3-8b") -> Result:
    """What the command says."""
    return CliRunner().invoke(app, ["plan", "--model", model, *options])


def answer(*options: str, model: str = "llama-3-8b") -> DryRunAnswer:
    """The command's JSON, which must be of the published form."""
    return DryRunAnswer.model_validate_json(plan(*options, "--json", model=model).stdout)


def test_a_change_that_fits() -> None:
    found = answer("--from", "data=16,zero_stage=1", "--to", "data=8", "--cluster", CLUSTER)
    assert found.fits and found.figures is not None and found.target["zero_stage"] == 1
    moved, memory, seconds = found.figures.bytes, found.figures.memory, found.figures.seconds
    assert moved.sent == moved.in_node + moved.between_nodes > 0
    assert [node.name for node in found.figures.nodes if not node.after] == found.figures.freed
    assert len(found.figures.members) == 8 and found.figures.members[0] == 0
    assert memory.before < memory.after < memory.lean < memory.peak <= 80e9
    assert seconds.floor == max(seconds.memory, seconds.node, seconds.network) < seconds.expected
    assert 0 <= sum(moved.excess.values()) <= moved.sent


def test_text_says_what_is_assumed() -> None:
    result = plan("--from", "data=16,zero_stage=1", "--to", "data=8", "--cluster", CLUSTER)
    assert result.exit_code == 0
    for said in ("fits", "become free", "between nodes", "seconds, expected", "assumed", "fp32 masters, Adam"):
        assert said in result.stdout


def test_a_rule_of_the_support_table_refuses() -> None:
    result = plan("--from", "data=2,tensor=2,pipe=2,zero_stage=1", "--to", "data=4,tensor=1")
    assert result.exit_code == 1
    assert "pipe=2 tensor=2 zero_stage=1: DeepSpeed's PipelineEngine has no tensor axis" in result.stdout


def test_a_change_that_does_not_fit_says_what_would() -> None:
    change = "--from", "data=8,zero_stage=1", "--to", "data=4", "--cluster", CLUSTER
    assert plan(*change, model="llama-2-13b").exit_code == 1
    found = answer(*change, model="llama-2-13b")
    assert not found.fits and found.figures is not None
    assert "needs" in found.refusal and "its device has 80.0 GB" in found.refusal
    assert any("lean switch" in way for way in found.ways_out)


def test_a_cluster_that_is_too_small_is_refused() -> None:
    found = answer("--from", "data=128,zero_stage=1", "--to", "data=256", "--cluster", CLUSTER)
    assert "needs 256 members and the cluster has 128" in found.refusal and found.figures is None


def test_shapes_alone_can_be_planned(tmp_path: Path) -> None:
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps({"a": [100, 10], "b": [10]}))
    assert answer("--from", "data=2,zero_stage=1", "--to", "data=1", model=str(file)).parameters == 1010
    refused = answer("--from", "data=2,zero_stage=1", "--to", "tensor=2", model=str(file))
    assert "nothing says how to cut a parameter" in refused.refusal


def test_a_configuration_decides_what_moves(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(TINY))
    config = tmp_path / "ds.json"
    options = "--from", "data=4,zero_stage=1", "--to", "data=2", "--deepspeed", str(config)
    sent = []
    for kind in ("Adam", "SGD"):
        config.write_text(json.dumps({"train_batch_size": 8, "optimizer": {"type": kind}}))
        found = answer(*options, model=str(tmp_path / "model.json"))
        assert found.figures is not None
        sent.append(found.figures.bytes.sent)
    assert sent[0] > sent[1]


def test_suggestions_fit_and_the_cheapest_comes_first(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(TINY))
    options = "--suggest", "--gpus", "2", "--from", "data=4,zero_stage=1", "--cluster", CLUSTER, "--json"
    found = json.loads(plan(*options, model=str(tmp_path / "model.json")).stdout)
    costs = [each["figures"]["seconds"]["expected"] for each in found]
    assert costs and costs == sorted(costs) and all(each["fits"] for each in found)


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert plan("--from", "data=16,zero_stage=1", "--to", "data=12", "--html", str(file)).exit_code == 0
    text = file.read_text(encoding="utf-8")
    assert text.count("<svg") == 3 and "Rounds of exchanges" in text
    assert not any(each in text for each in ("<script", "http", "src="))


def test_the_schema_is_published() -> None:
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == DryRunAnswer.model_json_schema()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "lama-3-8b", "--from", "data=2,zero_stage=1", "--to", "data=1"), "llama-3-8b"),
        (("--model", "missing.json", "--from", "data=2,zero_stage=1", "--to", "data=1"), "cannot be read"),
        (("--model", "llama-3-8b", "--from", "data=2", "--to", "data=1"), "zero_stage is missing"),
        (("--model", "llama-3-8b", "--from", "data:2", "--to", "data=1"), "is no axis and its size"),
        (("--model", "llama-3-8b", "--from", "date=2,zero_stage=1", "--to", "data=1"), "a layout has no 'date'"),
        (("--model", "llama-3-8b", "--from", "data=2,zero_stage=1", "--to", "data=3,expert=2"), "does not divide"),
        (("--model", "llama-3-8b", "--from", "data=2,zero_stage=1"), "--to is missing"),
        (
            ("--model", "llama-3-8b", "--from", "data=2,zero_stage=1", "--to", "data=1", "--cluster", "x"),
            "x: cannot be",
        ),
    ],
)
def test_errors_are_a_sentence_and_exit_code_2(options: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 2 and said in result.output and result.output.startswith("ds-dynatrain plan: ")


def test_a_broken_cluster_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("nodes = [")
    result = plan("--from", "data=2,zero_stage=1", "--to", "data=1", "--cluster", str(file))
    assert result.exit_code == 2 and "cluster.toml: this is no TOML" in result.output.replace("\n", "")


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from ds_dynatrain.cli.main import app;"
        "r = CliRunner().invoke(app, ['plan', '--model', 'llama-3-8b', '--from', 'data=4,zero_stage=1', '--to',"
        " 'data=2']); assert r.exit_code == 0, r.output; assert not {'torch', 'deepspeed'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def estimate(*options: str) -> Result:
    return CliRunner().invoke(app, ["estimate", *options])


def test_an_estimate_says_what_each_stage_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8.03 billion parameters in bf16: 16.1 GB of weights, 32.1 GB of masters, and each moment as much."""
    monkeypatch.setenv("COLUMNS", "160")
    result = estimate("llama-3-8b", "--data", "8", "--zero-stage", "3")
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    rows = {line.split("  ")[0]: line.split() for line in lines[: lines.index("")]}
    sizes = {stage: [*map(float, rows[f"data=8 zero_stage={stage}"][2:10:2])] for stage in range(4)}
    assert sizes[0] == pytest.approx([16.1, 32.1, 32.1, 32.1], abs=0.1)
    assert sizes[1] == sizes[2] == pytest.approx([16.1, 4.02, 4.02, 4.02], abs=0.1)
    assert sizes[3] == pytest.approx([2.01, 4.02, 4.02, 4.02], abs=0.1)
    switches = result.stdout.partition("switches from there")[2]
    assert "data=4 tensor=2 zero_stage=3" in switches and "data=8 zero_stage=3" not in switches


def test_an_estimate_that_is_refused() -> None:
    result = estimate("llama-3-8b", "--pipe", "2", "--tensor", "2")
    assert result.exit_code == 1 and "DeepSpeed's PipelineEngine has no tensor axis" in result.stdout
    assert estimate("llama-9").exit_code == 2
