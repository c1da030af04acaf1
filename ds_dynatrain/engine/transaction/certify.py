"""The certificate of a switch: what all members held before it is what they hold after it, element for element."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from ds_dynatrain.engine.digests import Digests, hint, state_digest
from ds_dynatrain.engine.transaction.shares import Shares, doubts, filled, joined
from ds_dynatrain.errors import CertificateError
from ds_dynatrain.space import Layout, VirtualParameterSpace

SIDES = ("source", "target")


def certify(
    vps: VirtualParameterSpace, source: Layout, target: Layout, before: Shares, after: Shares
) -> dict[str, Any]:
    """One digest over the whole state, equal on both sides: {"digest": ...}; or {"doubts": ...} of copies that differ.

    before, after: the sums over all members of each side. CertificateError names the tensor and the kind.
    """
    for side, sums in zip(SIDES, (before, after), strict=True):
        sums.check_kinds(side)
    wrong = {
        side: {**doubts(sums.places), **doubts(sums.copies)} for side, sums in zip(SIDES, (before, after), strict=True)
    }
    if any(wrong.values()):
        return {"doubts": wrong}
    held, arrived = (filled(sums.whole, vps, sums.kinds[0][1]) for sums in (before, after))
    kept: dict[str, Digests] = {}
    for kind in held:
        if kind not in arrived:
            if not vps.is_held(target, kind):
                continue
            raise CertificateError(f"state kind {kind!r} was there before the switch and is not after it")
        different = np.flatnonzero(held[kind] != arrived[kind])
        if len(different):
            name = vps.tensors[int(different[0])].name
            raise CertificateError(
                f"{kind} of {name!r} is not the same after the moves ({len(different)} of {len(vps.tensors)} tensors "
                f"differ in this kind){hint(kind)}"
            )
        kept[kind] = held[kind]
    extra = sorted(kind for kind in set(arrived) - set(held) if vps.is_held(source, kind))
    if extra:
        raise CertificateError(f"state kinds {extra} appeared in the switch")
    return {"digest": state_digest(kept)}


def joined_sides(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two parts of the reports as one."""
    pairs = {side: [each[side] for each in (one, other) if each[side] is not None] for side in SIDES}
    return {side: reduce(joined, pair) if pair else None for side, pair in pairs.items()}
