"""`ds-dynatrain simulate`: what it prints, which traces it reads and draws, and what it refuses by row or option."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ds_dynatrain.cli.main import app
from ds_dynatrain.plan import Topology
from ds_dynatrain.simulate.outcome import SimulationOutcome
from ds_dynatrain.simulate.trace import at_the_beginning, read_trace
from tests.balance.profiles import profile

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs/reference/simulate.schema.json"
LOSS = '{"seconds": 60, "event": "loss", "members": [0, 1]}'
JOIN = LOSS.replace("loss", "join")
END = '{"seconds": 600, "event": "end"}'
CLUSTER = Topology.uniform(4, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    profile([0.01] * 4, batch=32).save(tmp_path / "profile.json")
    (tmp_path / "cluster.toml").write_text(CLUSTER.to_toml())
    return tmp_path


def simulate(folder: Path, *options: str, trace: str = "trace.jsonl") -> Result:
    files = (str(folder / trace), "--profile", str(folder / "profile.json"), "--cluster", str(folder / "cluster.toml"))
    return CliRunner().invoke(app, ["simulate", *files, *options])


def refused(folder: Path, *options: str, trace: str = "trace.jsonl") -> str:
    result = simulate(folder, *options, trace=trace)
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.startswith("ds-dynatrain simulate: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_a_table_json_and_a_picture(folder: Path) -> None:
    (folder / "trace.jsonl").write_text(f"# a comment\n{LOSS}\n\n{END}\n")
    shown = simulate(folder)
    assert shown.exit_code == 0, shown.output
    assert "0.17 hours, of which 0.00 without a member; 1 × loss" in shown.stdout
    assert "start_seconds=30: from the start of a process until it can train" in shown.stdout
    found = SimulationOutcome.model_validate_json(simulate(folder, "--json").stdout)
    assert len(found.policies) == 5 and found.seconds == 600 and found.events == {"loss": 1}
    assert any("data=8" in line for line in found.assumptions)
    picture = folder / "picture.svg"
    assert simulate(folder, "--picture", str(picture), "--assume", "start_seconds=5").exit_code == 0
    assert "this library, buddies" in picture.read_text()
    assert "picture.odd: " in refused(folder, "--picture", str(folder / "picture.odd"))


def test_the_schema_is_that_of_the_code() -> None:
    assert json.loads(SCHEMA.read_text()) == SimulationOutcome.model_json_schema()


def test_needs_no_torch(folder: Path) -> None:
    (folder / "trace.jsonl").write_text(f"{LOSS}\n{END}\n")
    code = "import sys; sys.modules['torch'] = None; from ds_dynatrain.cli.main import main; main()"
    files = ["trace.jsonl", "--profile", "profile.json", "--cluster", "cluster.toml"]
    subprocess.run([sys.executable, "-c", code, "simulate", *files], cwd=folder, check=True, capture_output=True)


def test_a_drawn_trace_can_be_played_again(folder: Path) -> None:
    drawn = simulate(folder, "--draw", "hours=2,loss=900,slow=1800", "--seed", "3", "--json")
    assert drawn.exit_code == 0, drawn.stderr
    assert drawn.stdout == simulate(folder, "--json").stdout
    rows = read_trace(folder / "trace.jsonl", CLUSTER)
    assert len(rows) > 4 and rows[-1].seconds == 7200 and {len(row.members) for row in rows[:-1]} == {2}
    assert "trace.jsonl exists; give the name of a new file" in refused(folder, "--draw", "hours=2,loss=900")


def test_a_spot_market(folder: Path) -> None:
    """Counts are scaled to the cluster's four nodes; what makes no difference then is left out."""
    spot = folder / "spot.csv"
    spot.write_text("# nodes of 16\nseconds,nodes\n0,8\n300,16\n600,15\n900,3\n1200,0\n1500,16\n1800,16\n")
    rows = read_trace(spot, CLUSTER)
    assert [(row.seconds, row.event, row.members) for row in rows] == [
        (300, "join", (4, 5, 6, 7)),
        (900, "preemption", (2, 3, 4, 5, 6, 7)),
        (1200, "preemption", (0, 1)),
        (1500, "join", (0, 1, 2, 3, 4, 5, 6, 7)),
        (1800, "end", ()),
    ]
    assert at_the_beginning(rows, CLUSTER.node_of) == {0, 1, 2, 3}
    assert "of which 0.08 without a member" in simulate(folder, trace="spot.csv").stdout


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "row 1: the trace is empty"),
        ([LOSS, "{"], "row 2: the row: "),
        (['{"seconds": 1, "event": "death"}'], "row 1: event: "),
        (['{"seconds": -1, "event": "end"}'], "row 1: seconds: "),
        (['{"seconds": 1, "event": "end", "why": 2}'], "row 1: why: "),
        ([LOSS, "", END.replace("600", "59")], "row 3: 59 s is before the row above, 60 s; sort the rows by time"),
        ([LOSS.replace("[0, 1]", "[8]")], "row 1: member 8 is unknown; the cluster has 8, 0 to 7"),
        ([LOSS, LOSS], "row 2: loss of member 0, which is not there"),
        ([LOSS, JOIN, JOIN], "row 3: join of member 0, which is there already"),
        ([LOSS.replace("[0, 1]", "[]")], "row 1: loss of 0 members"),
        ([END, LOSS.replace("60", "601")], "row 2: it comes after the end at 600 s"),
    ],
)
def test_wrong_rows(folder: Path, lines: list[str], said: str) -> None:
    (folder / "trace.jsonl").write_text("\n".join(lines))
    assert f"trace.jsonl: {said}" in refused(folder)


def test_wrong_options_and_files(folder: Path) -> None:
    (folder / "trace.jsonl").write_text(f"{LOSS}\n{END}\n")
    (folder / "odd.csv").write_text("0,1\n5,many\n")
    assert "odd.csv: row 2: '5,many' is no time and number of nodes" in refused(folder, trace="odd.csv")
    assert "--seed 3: nothing is drawn from it without --draw" in refused(folder, "--seed", "3")
    for row in ("nan,3", "-5,3", "5,-3"):
        (folder / "odd.csv").write_text(f"0,1\n{row}\n")
        assert f"odd.csv: row 2: '{row}' has a number below 0" in refused(folder, trace="odd.csv")
    assert "--assume start=3: start: " in refused(folder, "--assume", "start=3")
    assert "--draw loss=9: hours: " in refused(folder, "--draw", "loss=9", trace="new.jsonl")
    assert "needs 16 members and 8 may train" in refused(folder, "--layout", "data=16")
    assert "--least 9 and at most 8 members" in refused(folder, "--least", "9")
    said = refused(folder, "--layout", "pipe=2,data=4,boundaries=0:3:9")
    assert "profile.json: the profile is of another model" in said and "end with 4, the number of layers" in said
    assert "of another model: 4 layers cannot be cut into 8 stages" in refused(folder, "--layout", "pipe=8")
    (folder / "profile.json").write_text("{}")
    assert "layers is missing" in refused(folder)
