"""What the package logs by itself: a process of its own, whose `logging` nobody has configured."""

from __future__ import annotations

import os
import subprocess
import sys

SAYS = """
import logging, time
from ds_dynatrain.report import log, logger, show_by_default, telling_if_long
{before}
show_by_default()
show_by_default()
log.LONG_SECONDS = 0.05
{after}
logger.info("a switch")
logging.getLogger("ds_dynatrain.elastic").info("a node")
logger.warning("a fault")
with telling_if_long("nobody"):
    pass
with telling_if_long(lambda: "the others"):
    time.sleep(0.3)
"""


def said(rank: int = 0, before: str = "", after: str = "") -> list[str]:
    """The lines on stderr, without the time that each begins with."""
    script = SAYS.format(before=before, after=after)
    env = {**os.environ, "LOCAL_RANK": str(rank)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    return [line.partition("] ds_dynatrain: ")[2] or line for line in done.stderr.splitlines()]


def test_the_first_process_of_a_node_shows_events_and_long_waits_once() -> None:
    assert said() == ["a switch", "a node", "a fault", "has waited 0.05 s for the others"]


def test_the_other_processes_show_warnings() -> None:
    assert said(rank=1) == ["a fault"]


def test_who_configures_logging_decides() -> None:
    configured = 'logging.basicConfig(level="WARNING", format="%(message)s")'
    assert said(before=configured) == ["a fault"]
    set_level = 'logger.setLevel("WARNING")'
    assert said(after=f"{configured}; {set_level}") == ["a fault"]
