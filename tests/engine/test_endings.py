"""How jobs end under a real torchrun: with code 0 where all is well, at once and with the error in sight where not."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.elastic.warm import torchrun

SCRIPT = Path(__file__).parent / "scripts" / "ending.py"
LIMIT = 90.0
REPEATS = 5
MOST_SECONDS = 30.0
"""From an error on one rank to the end of all: 5 s of time-out, and what ending processes takes on a busy machine."""


@dataclass(frozen=True)
class End:
    """Exit code of torchrun, all that was printed, and when it ended (seconds since the epoch)."""

    code: int
    output: str
    at: float


def launch(how: str, is_warm: bool = False) -> End:
    """`scripts/ending.py` with four processes, new ones or forked."""
    code, output = torchrun(["--nproc-per-node=4", str(SCRIPT), how], LIMIT, is_warm)
    return End(code, output, time.time())


def working_ends(end: End) -> list[int]:
    """Members whose scripts came to their last line."""
    return sorted(int(member) for member in re.findall(r"end (\d) working", end.output))


GOOD = {
    "all work": [0, 1, 2, 3],
    "idle members": [0, 1],
    "goes idle": None,
    "loader workers": None,
    "own loop": [0, 1, 2, 3],
    "on idle": [0, 1],
    "switch in the last step": None,
    "switch without a step": [0, 1],
}


@pytest.mark.full
@pytest.mark.parametrize("how", GOOD)
def test_a_script_that_simply_ends(how: str) -> None:
    end = launch(how)
    assert end.code == 0, end.output[-6000:]
    assert "Traceback" not in end.output, end.output[-6000:]
    if how == "on idle":
        assert "idle work on 2" in end.output and "idle work on 3" in end.output
    if GOOD[how] is not None:
        assert working_ends(end) == GOOD[how]


@pytest.mark.full
@pytest.mark.parametrize("how", GOOD)
def test_it_ends_every_time(how: str) -> None:
    for _ in range(REPEATS - 1):
        end = launch(how)
        assert end.code == 0 and "Traceback" not in end.output, end.output[-6000:]


@pytest.mark.parametrize(
    ("how", "words", "is_warm"),
    [
        ("working raises", "ValueError: wrong on working member 1", True),
        pytest.param("working raises", "ValueError: wrong on working member 1", False, marks=pytest.mark.full),
        pytest.param("idle raises", "ValueError: wrong on idle member 3", False, marks=pytest.mark.full),
        pytest.param("one loops once more", "Error", False, marks=pytest.mark.full),
    ],
)
def test_an_error_is_seen_and_ends_the_job(how: str, words: str, is_warm: bool) -> None:
    end = launch(how, is_warm)
    assert end.code != 0, end.output[-6000:]
    assert words in end.output, end.output[-6000:]
    begin = re.search(r"error at ([\d.]+)", end.output)
    assert begin is not None and end.at - float(begin[1]) < MOST_SECONDS
