"""Messages between two ranks wait as long as collectives do.

A receiver of gloo's gives up after the time that connecting was given, whatever the group is told later; a stage of a
pipeline may compute for longer. Time that is given with each wait counts.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from deepspeed.constants import default_pg_timeout
from torch._C._distributed_c10d import Work

from ds_dynatrain.adapters.forwarded import ForwardedWork
from ds_dynatrain.adapters.pair import Pair
from ds_dynatrain.adapters.process_groups import Made
from ds_dynatrain.adapters.traffic import MESSAGES


class PatientWork(ForwardedWork):
    """A message that was begun."""

    def wait(self, timeout: timedelta = default_pg_timeout) -> bool:
        """Until it has gone, or come; RuntimeError after the time-out."""
        return self._work.wait(timeout)


class PatientGroup(Pair):
    """A gloo group over the same connections as another one, which it keeps."""


def patient(made: Made) -> Made:
    """A gloo group whose messages wait as long as its collectives do."""
    return PatientGroup(made[0]), made[1]


def _message(name: str) -> Callable[..., Work]:
    def call(self: PatientGroup, *arguments: Any, **named: Any) -> Work:
        return PatientWork(getattr(self._group, name)(*arguments, **named))

    call.__name__ = name
    return call


for _name in MESSAGES:
    setattr(PatientGroup, _name, _message(_name))
