"""The verdict over members' reports: what is equal passes, and what differs is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ds_dynatrain.engine.certificate import SideDigests, verdict
from ds_dynatrain.errors import CertificateError
from ds_dynatrain.plan import plan_switch
from ds_dynatrain.space import Layout, LogicalTensor, VirtualParameterSpace, ZeroRules, standard_kinds

TENSORS = (LogicalTensor("first", (4, 3), 0), LogicalTensor("second", (5,), 0))
KINDS = ("weight", "master", "exp_avg")
TWO, FOUR = Layout(data=2, zero_stage=1), Layout(data=4, zero_stage=1)
WHOLE = {"weight": [11, 12], "master": [2**63 + 5, 22], "exp_avg": [31, 2**64 - 1]}
CARRY = {"counters": "a", "groups": "b", "scalars": "c"}
Reports = dict[int, dict[str, Any]]
Change = Callable[[Reports], object]


def digests(size: int, rank: int) -> dict[str, str]:
    """The share of a rank: the whole of a replicated kind, else parts that add up to the whole modulo 2**64."""
    made = {}
    for kind in KINDS:
        whole = np.array(WHOLE[kind], dtype=np.uint64)
        part = np.full(2, 1000 + rank, dtype=np.uint64)
        rest = whole - np.sum(
            [np.full(2, 1000 + other, dtype=np.uint64) for other in range(1, size)], axis=0, dtype=np.uint64
        )
        made[kind] = whole if kind == "weight" else part if rank else rest
    return SideDigests(made).to_json()


def reports() -> Reports:
    """Two members before, four after."""
    found: Reports = {}
    for member in range(4):
        found[member] = {"target": digests(4, member), "carry_after": dict(CARRY), "stream_after": f"stream {member}"}
        found[member] |= {"shared_stream_after": f"shared {member}"}
        if member < 2:
            found[member] |= {"source": digests(2, member), "carry_before": dict(CARRY)}
            found[member] |= {"stream_before": f"stream {member}", "shared_stream_before": f"shared {member}"}
        if member != 1:  # rank 0 and the two that start to work
            found[member]["rest"] = "buffers and objects"
    return found


def judge(found: Reports) -> str:
    rules = ZeroRules(sub_group_size=100)
    vps = VirtualParameterSpace(TENSORS, rules, standard_kinds(2, stale_grad=2), TWO, (0, 1), plan_switch)
    return verdict(vps, TWO, FOUR, found, (0, 1), (0, 1, 2, 3))


def changed(side: str, member: int, kind: str, tensor: int) -> Change:
    """One digest is another number."""

    def change(found: Reports) -> None:
        read = {name: values.copy() for name, values in SideDigests.from_json(found[member][side]).of.items()}
        read[kind][tensor] += np.uint64(1)
        found[member][side] = SideDigests(read).to_json()

    return change


def test_equal_sides_pass_with_one_digest() -> None:
    assert judge(reports()) == judge(copy.deepcopy(reports())) and len(judge(reports())) == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed("target", 2, "master", 1), r"master of 'second' is not the same after the moves \(1 of 2 tensors"),
        (changed("source", 0, "exp_avg", 0), "exp_avg of 'first' is not the same after"),
        (
            changed("source", 1, "weight", 1),
            "source: weight of 'second' differs between the replicas of members 0 and 1",
        ),
        (
            changed("target", 3, "weight", 0),
            "target: weight of 'first' differs between the replicas of members 0 and 3",
        ),
        (lambda found: found[1]["source"].pop("exp_avg"), "source: only one of members 0 and 1 holds exp_avg"),
        (lambda found: [each["target"].pop("exp_avg") for each in found.values()], "'exp_avg' was there before"),
        (lambda found: [found[member]["source"].pop("exp_avg") for member in (0, 1)], r"\['exp_avg'\] appeared"),
        (lambda found: found[1]["carry_before"].update(groups="x"), "carry of member 1 before .* in: groups"),
        (
            lambda found: found[3]["carry_after"].update(counters="x", scalars="y"),
            "carry of member 3 after .* counters, scalars",
        ),
        (lambda found: found[2]["carry_after"].pop("scalars"), "carry of member 2 after .* in: scalars"),
        (lambda found: found[1].update(stream_after="stream 0"), "random streams of data index 1"),
        (lambda found: found[3].update(rest="other"), "module buffers or carried objects of member 3"),
    ],
)
def test_what_differs_is_named(change: Change, words: str) -> None:
    found = reports()
    change(found)
    with pytest.raises(CertificateError, match=words):
        judge(found)


def test_an_error_that_all_replicas_share_is_found() -> None:
    found = reports()
    for member in range(4):
        changed("target", member, "weight", 1)(found)
    with pytest.raises(CertificateError, match="weight of 'second' is not the same after the moves"):
        judge(found)
