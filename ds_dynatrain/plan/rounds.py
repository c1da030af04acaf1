"""The order in which a member exchanges with its peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

ANYWHERE: Mapping[int, str] = {}


def rounds(peers: Iterable[int], me: int, nodes: Mapping[int, str] = ANYWHERE) -> list[int]:
    """Return the peers of `me`, each once, in the order in which `me` exchanges with them.

    nodes: the node of each member; members that are not in it count as being on one node.

    A pair (a, b) has the key (whether both are on one node, a XOR b, smaller of a and b). Both ends know it without
    communication, and it orders all pairs of all members totally. So exchanges in order cannot deadlock: of all pairs
    that are not done, the one with the least key is the next one of both its members.

    Two peers of a member differ in their XOR, so pairs of one XOR have no member in common and run at the same time.
    2^n members that all exchange need 2^n - 1 such rounds, the fewest possible. A chain of pairs that wait for each
    other is short where members exchange with those next to them: pairs (a, a + 1) with an even a have the least XOR of
    all.

    Pairs between nodes come first, as they are the slow ones. If nodes have 2^k members with consecutive numbers, a
    round leads the members of a node to different members of one other node, so all network cards work. Pairs inside a
    node follow; those that read accelerator memory run beside.
    """
    mine = nodes.get(me)
    return sorted({*peers}, key=lambda peer: (nodes.get(peer) == mine, peer ^ me))
