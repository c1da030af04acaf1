"""Transports (ways) of bytes between any two members of a switch. They are chosen while the switch is prepared.

Both ends of a pair choose the same transport. Members on one machine read each other's memory if the system permits it,
including accelerator memory. Other accelerators use the library of their collectives. All remaining bytes go through
gloo, over the transfer group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_dynatrain.adapters.groups.communicators import Communicator, CommunicatorLink, can_send_between_devices
from ds_dynatrain.adapters.groups.device import HOST, compute_device, device_backend
from ds_dynatrain.adapters.groups.world import World
from ds_dynatrain.errors import SwitchFailed, SwitchRefused
from ds_dynatrain.membership.control import Control
from ds_dynatrain.membership.proposal import Proposal
from ds_dynatrain.membership.session import Session
from ds_dynatrain.plan import MemberPlan, split
from ds_dynatrain.transfer import (
    Batching,
    GroupTransport,
    Neighbors,
    NeighborTransport,
    Sharing,
    Transport,
    device_memory,
    find_neighbors,
)
from ds_dynatrain.transfer.neighbors import NOBODY, machine, permit_readers

POLL_SECONDS = 0.05
"""Time between two polls; it can be long, because training continues meanwhile."""


@dataclass
class Ways:
    """The transports between one member and all others, in both directions.

    way: the setting `dynatrain.transport`.
    stop: called in every wait; raises if the switch will not happen.
    neighbors: members on this machine whose memory can be read.
    batching: the moves that use the library of the accelerators' collectives.
    """

    way: str
    control: Control
    proposal: Proposal
    stop: Callable[[], None]
    neighbors: Neighbors | None = None
    batching: Batching | None = None
    _machine: str = ""
    """Key of the list of members on this machine."""
    _on_machine: Sequence[int] = ()
    """Members on this machine, including this one."""

    def announce(self) -> None:
        """Post which machine this member is on. All members must do so before any of them calls `meet`."""
        if self.way != "gloo":
            self._machine = f"machine/{self.proposal.generation}/{machine()}"
            self.control.add_to_list(self._machine, self.control.member)

    def meet(self) -> None:
        """Find the members whose memory can be read.

        Raises SwitchRefused if the user asked for memory reads between all members and some cannot read each other.
        """
        if self.way == "gloo":
            return
        self._on_machine = self.control.read_list(self._machine)
        member, device = self.control.member, compute_device()
        self.neighbors = find_neighbors(member, self._share, None if self.way == "nccl" else device)
        if self.way == "ipc" and self._far:
            far = sorted(self._far)
            self.end()
            raise SwitchRefused(
                f'dynatrain.transport is "ipc", and member {member} on {device} and members {far} cannot read each '
                "other's accelerator memory",
                'set it to "auto", which takes other ways between these',
            )

    def agree_on_batching(
        self, plan: MemberPlan, kinds: frozenset[str], budget_bytes: int, session: Session, world: World
    ) -> None:
        """Agree with all members on the moves that use the library of the accelerators' collectives.

        These are the moves of state on accelerators between members that do not read each other's memory. If the user
        asked for another transport, no member has such moves. Raises SwitchRefused if the user asked for this one and
        there is no such library.

        plan: this member's moves.
        kinds: the state kinds that are on accelerators before and after the switch.
        world: the next world; its `moves_by_device` is set to whether there are such moves.
        """
        if self.way == "nccl" and not can_send_between_devices():
            device = compute_device()
            has = "which has none" if device == HOST else f"whose library is {device_backend()}"
            raise SwitchRefused(
                f'dynatrain.transport is "nccl", and member {self.control.member} computes on {device}, {has}',
                'set it to "auto", which takes what there is',
            )
        if self.way not in ("auto", "nccl") or not can_send_between_devices():
            return
        mine = max(len(split(phase, self._far, kinds, kinds)[1]) for phase in (plan.rounds, plan.relays))
        most = session.reduce("batches", mine, max, doing="finding the way between devices")
        world.moves_by_device = most > 0
        self.batching = Batching(self._far, kinds, most, budget_bytes) if most else None

    def sharing(self, kinds: frozenset[str], after: frozenset[str]) -> Sharing | None:
        """Return the members whose accelerator memory this member reads; None if it reads none.

        kinds, after: the state kinds whose buffers are on accelerators before, and after the switch.
        """
        memory, lenders = device_memory(compute_device()), self._lenders
        return Sharing(memory, lenders, kinds, after) if memory is not None and lenders else None

    def transport(self, world: World | None) -> Transport:
        """Return the transport through host memory between all members of both worlds.

        Raises SwitchFailed if there is no next world.
        """
        if world is None or world.transfer is None:
            raise SwitchFailed("the groups of the next world are not there")
        stop = None if self.control.watch is None else self.stop
        group = GroupTransport(world.transfer, world.transfer_members, stop)
        if self.neighbors is None:
            return group
        permit_readers()
        return NeighborTransport(group, self.neighbors.processes)

    def link(self, world: World | None, stop: Callable[[], None]) -> CommunicatorLink | None:
        """Return the connected link between the accelerators of all members of both worlds.

        Return None if there is no connected link, or if no moves use it.
        """
        if self.batching is None or world is None or world.moving is None:
            return None
        return CommunicatorLink(world.moving, self.control.member, world.transfer_members, stop)

    def may_lend(self, old: World | None) -> Communicator | None:
        """Return the communicator of the old world that moves between accelerators may use; None if there is none.

        All members of the old world get the same answer, even before they reach the moves. The new world uses the
        communicator as well, unless it connects members that leave. An elastic job keeps no communicators.
        """
        if self.way not in ("auto", "nccl") or not can_send_between_devices() or old is None or old.status is not None:
            return None
        return old.communicators.get(("", self.proposal.union))

    def end(self) -> None:
        """Stop letting other members read this member's memory."""
        if self.neighbors is not None:
            permit_readers(NOBODY)
            self.neighbors = None

    @property
    def _lenders(self) -> frozenset[int]:
        """Members whose accelerator memory this member reads."""
        return frozenset() if self.neighbors is None else self.neighbors.lenders

    @property
    def _far(self) -> frozenset[int]:
        """Other members whose accelerator memory this member does not read."""
        return frozenset(self.proposal.union) - {self.control.member} - self._lenders

    def _share(self, what: str, record: Any) -> Mapping[int, Any]:
        """Post a record for all members on this machine, and return their records by member."""
        board, key = self.control, f"{what}/{self.proposal.generation}"
        board.post(f"{key}/{board.member}", record)
        keys = {member: f"{key}/{member}" for member in self._on_machine}
        return board.wait(keys, "finding neighbors", stop=self.stop, longest=POLL_SECONDS, is_there=False)
