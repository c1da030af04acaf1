"""`ds-dynatrain compare-exact`: what it says of two report files, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from ds_dynatrain.cli.main import app
from ds_dynatrain.exact.bits.bit_records import ExactJob, ExactStep, read_exact
from ds_dynatrain.report import EventWriter

KINDS = ("exp_avg", "master", "weight")
JOB = ExactJob(seed=7, batch_size=5, leaf_size=2, kinds=KINDS, tensors=(("in.bias", (2,)), ("out.weight", (3, 2))))


def step(number: int, **more: Any) -> ExactStep:
    """As a sound run has it."""
    state = {kind: bytes([number, *[7] * 7, *[8] * 8]) for kind in KINDS}
    return replace(ExactStep(number, 0.5 / number, (0.1, 2.0 / number, -0.0), state), **more)


def written(path: Path, steps: Iterable[ExactStep], job: ExactJob = JOB) -> Path:
    writer = EventWriter(path)
    writer.write_line(job.to_json())
    for each in steps:
        writer.write_line(each.to_json())
    return path


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return written(tmp_path / "one", map(step, range(1, 6)))


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare-exact", *map(str, arguments)])


def told(one: Path, other: Path) -> Mapping[str, Any]:
    """The JSON; its verdict agrees with the exit code."""
    result = compare(one, other, "--json")
    said: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if said["identical"] else 1)
    return said


def test_what_was_written_is_read(sound: Path) -> None:
    found = read_exact(sound)
    assert (found.job, list(found.steps.values())) == (JOB, [step(number) for number in range(1, 6)])
    odd = step(6, norm=float("inf"), losses=(float("nan"), None, -0.0), state={})
    EventWriter(sound).write_line(odd.to_json())
    assert read_exact(sound).steps[6].digest == odd.digest


def test_two_that_are_alike(sound: Path, tmp_path: Path) -> None:
    longer = written(tmp_path / "other", [*map(step, range(1, 4)), step(4, state={}), *map(step, range(5, 8))])
    result = compare(sound, longer)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "steps 1 to 5 are bit-identical: losses and norms of all, weights and moments after 4 of them, the last of "
        "which is step 5",
        f"Only in {longer}: 2 steps, 6 to 7.",
    ]
    said = told(sound, longer)
    assert (said["identical_steps"], said["digested_steps"], said["last_digested_step"]) == (5, 4, 5)
    assert "weights and moments after each" in compare(sound, sound).stdout


OTHER = bytes([4, *[7] * 7, *[9] * 8])
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a tensor": (
        {"state": {**step(4).state, "exp_avg": OTHER, "weight": OTHER}},
        "step 4 is the first that differs: weight of 'out.weight': 0808080808080808 and 0909090909090909",
    ),
    "a leaf": ({"losses": (0.1, 0.25, -0.0)}, "step 4 is the first that differs: loss of leaf 1: 0.5 and 0.25"),
    "a sign": ({"losses": (0.1, 0.5, 0.0)}, "step 4 is the first that differs: loss of leaf 2: -0.0 and 0.0"),
    "the norm": ({"norm": 0.1}, "step 4 is the first that differs: norm: 0.125 and 0.1"),
    "the last digit": ({"norm": 0.12500000000000003}, "norm: 0.125 and 0.12500000000000003"),
    "fewer leaves": ({"losses": (0.1, 0.5)}, "step 4 is the first that differs: leaves: 3 and 2"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_named(sound: Path, tmp_path: Path, name: str) -> None:
    more, words = CASES[name]
    other = written(tmp_path / "other", [*map(step, range(1, 4)), step(4, **more), step(5, norm=9.0)])
    result = compare(sound, other)
    assert result.exit_code == 1
    assert words in result.stdout.splitlines()[0]
    assert "weights and moments were equal after step 3" in result.stdout
    said = told(sound, other)
    assert (said["step"], said["identical_steps"]) == (4, 3)
    first = said["differences"][0]
    assert first["kind"] in words and first["name"] in words
    if name == "a tensor":
        assert [each["kind"] for each in said["differences"]] == ["weight", "exp_avg"]


def test_a_loss_that_died_with_its_rank(sound: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other", [*map(step, range(1, 5)), step(5, losses=(0.1, None, -0.0))])
    assert compare(sound, other).stdout.endswith("after each; 1 losses or norms are in one of them alone\n")
    assert told(other, sound)["unknown"] == 1
    wrong = written(tmp_path / "wrong", [step(1, losses=(None, None, 0.0))])
    assert told(sound, wrong)["differences"][0]["name"] == "leaf 2"


def test_a_job_that_went_back(sound: Path, tmp_path: Path) -> None:
    """What it made before that does not count, and where it goes on its lines begin anew."""
    other = written(tmp_path / "other", [*map(step, range(1, 4)), step(4, norm=9.0)])
    written(other, map(step, range(3, 6)))
    assert told(sound, other)["identical_steps"] == 5


def test_switches_and_other_lines_are_passed_over(sound: Path, tmp_path: Path) -> None:
    with sound.open("a") as file:
        file.write('{"event":"switch"}\n{"event":"gain"}\n')
    assert compare(sound, sound).exit_code == 0


def lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[bytes], bytes]:
    return lambda data: b"\n".join(change(data.split(b"\n")))


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda data: data[:-30], "line 6: cut off: its process ended while it wrote"),
    "a digit": (lambda data: data.replace(b"0.25", b"0.26", 1), "line 3: its digest is '.*', and what it says makes"),
    "a tensor": (lambda data: data.replace(b"Agc", b"Bgc", 1), "line 3: its digest is"),
    "no JSON": (lines(lambda held: [*held[:2], b"\x00\xff", *held[3:]]), "line 3: damaged, it is no JSON"),
    "a line": (lines(lambda held: [*held[:2], *held[3:]]), "line 3: step 3 comes after step 1: lines between"),
    "its begin": (lines(lambda held: held[1:]), "line 1: a step before any line says of which job"),
    "what it is of": (lambda data: data.replace(b"exact_step", b"exact_stop", 1), "line 2: a line about 'exact_stop'"),
    "a list for a table": (lambda data: re.sub(rb'"state":{.*?}', b'"state":[1]', data, count=1), "line 2: "),
    "a key": (lambda data: data.replace(b'"norm"', b'"morn"', 1), "line 2: it lacks 'norm'"),
    "another file": (lambda data: b'{"loss": 1}\n', "line 1: (it lacks 'event'|no line of a report file)"),
    "all of it": (lambda data: b"", "no step of an exact job is in it; it is to be the report.jsonl"),
    "switches alone": (lambda data: b'{"event":"switch"}\n', "no step of an exact job is in it"),
    "a list": (lambda data: b"[1]\n", "line 1: no line of a report file"),
    "the header alone": (lines(lambda held: [held[0], b""]), "no step of an exact job is in it"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused_by_name(sound: Path, tmp_path: Path, name: str) -> None:
    spoil, words = DAMAGE[name]
    other = tmp_path / "other"
    other.write_bytes(spoil(sound.read_bytes()))
    result = compare(sound, other)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"ds-dynatrain compare-exact: {other}")
    assert re.search(words, result.stderr), result.stderr


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(place=st.integers(0, 1 << 20), byte=st.integers(0, 255))
def test_any_byte_that_is_another(sound: Path, tmp_path: Path, place: int, byte: int) -> None:
    """Nothing is said of a damaged file but that it is; what stays the same, as a number with another sign of 0, is."""
    data, other = bytearray(sound.read_bytes()), tmp_path / "spoilt"
    data[place % len(data)] = byte
    other.write_bytes(data)
    try:
        run = read_exact(other)
    except ValueError as error:
        assert str(error).startswith(f"{other}")
    else:
        assert run.job != JOB or run.steps == read_exact(sound).steps


def test_a_file_that_is_not_there(sound: Path, tmp_path: Path) -> None:
    result = compare(sound, tmp_path / "none")
    assert result.exit_code == 2 and "none" in result.stderr


UNRELATED: dict[str, tuple[ExactJob, str]] = {
    "seed": (replace(JOB, seed=8), "seed: 7 and 8"),
    "batch": (replace(JOB, batch_size=6), "batch size: 5 and 6"),
    "leaf": (replace(JOB, leaf_size=3), "leaf size: 2 and 3"),
    "optimizer": (replace(JOB, kinds=("master", "momentum", "weight")), "kinds: exp_avg, master, weight and master,"),
    "shape": (replace(JOB, tensors=(("in.bias", (3,)), JOB.tensors[1])), r"tensors: 'in.bias' of shape \[2\] and"),
    "fewer": (replace(JOB, tensors=JOB.tensors[:1]), "tensors: 2 and 1"),
}


@pytest.mark.parametrize("name", UNRELATED)
def test_two_jobs_are_refused(sound: Path, tmp_path: Path, name: str) -> None:
    job, words = UNRELATED[name]
    result = compare(sound, written(tmp_path / "other", [step(1, state={})], job))
    assert result.exit_code == 2
    assert re.search(f"of two jobs, whose bits have nothing in common: {words}", result.stderr)
    both = written(sound, [step(6, state={})], job)
    assert "line 7: another job begins here" in compare(both, both).stderr


def test_nothing_in_common(sound: Path, tmp_path: Path) -> None:
    later = written(tmp_path / "later", map(step, range(8, 10)))
    result = compare(sound, later)
    assert result.exit_code == 2 and "no step in common: steps 1 to 5 and steps 8 to 9" in result.stderr
    bare = written(tmp_path / "bare", [step(number, state={}) for number in range(1, 6)])
    result = compare(sound, bare)
    assert result.exit_code == 2 and "give both jobs the same dynatrain.exact.digest_every_steps" in result.stderr
    other = written(tmp_path / "other", [step(number, state={}, norm=9.0) for number in range(1, 6)])
    assert compare(sound, other).exit_code == 1


def test_it_needs_no_torch() -> None:
    code = (
        "import sys\nfrom ds_dynatrain.cli.main import app\n"
        "try: app(['compare-exact', 'none', 'none'])\n"
        "except SystemExit as end: assert end.code == 2\n"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
