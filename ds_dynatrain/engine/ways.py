"""Which way bytes go between any two members of a switch: found while it is prepared, the same at both ends.

Members of one machine read each other's memory where that is permitted, also on their accelerators. Between other
accelerators the library of their collectives sends, and all that is left goes over the transfer group, by gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ds_dynatrain.adapters.communicators import Communicator, CommunicatorLink, can_send_between_devices
from ds_dynatrain.adapters.device import HOST, compute_device, device_backend
from ds_dynatrain.adapters.world import World
from ds_dynatrain.engine.control import Control
from ds_dynatrain.engine.proposal import Proposal
from ds_dynatrain.engine.transaction.session import Session
from ds_dynatrain.errors import SwitchFailed, SwitchRefused
from ds_dynatrain.plan import MemberPlan
from ds_dynatrain.transfer import (
    Batching,
    GroupTransport,
    Neighbors,
    RoutedTransport,
    Sharing,
    Transport,
    device_memory,
)
from ds_dynatrain.transfer.apart import split
from ds_dynatrain.transfer.neighbors import machine

POLL_SECONDS = 0.05
"""Nobody stands still meanwhile."""


@dataclass
class Ways:
    """One member's, to and from all others.

    way: as `dynatrain.transport`. stop: called in every wait, raises if the switch will not come about. neighbors: who
    is on this machine and may be read; batching: what the accelerators' library sends.
    """

    way: str
    control: Control
    proposal: Proposal
    stop: Callable[[], None]
    neighbors: Neighbors | None = None
    batching: Batching | None = None

    def announce(self) -> None:
        """Say which machine this member is on; all have done so before anyone calls `meet`."""
        if self.way != "gloo":
            self.control.add_to_list(self._machine, self.control.member)

    def meet(self) -> None:
        """Find the neighbors. SwitchRefused where all were to be read, and some cannot be."""
        if self.way == "gloo":
            return
        member, device, seconds = self.control.member, compute_device(), self.control.timeout_seconds
        read = None if self.way == "nccl" else device
        self.neighbors = Neighbors.meet(member, self._share, seconds, self.stop, read)
        if self.way == "ipc" and self._far:
            far = sorted(self._far)
            self.end()
            raise SwitchRefused(
                f'dynatrain.transport is "ipc", and member {member} on {device} and members {far} cannot read each '
                "other's accelerator memory",
                'set it to "auto", which takes other ways between these',
            )

    def agree_on_batching(
        self, plan: Callable[[], MemberPlan], kinds: frozenset[str], budget_bytes: int, session: Session, world: World
    ) -> None:
        """What goes by the library of the accelerators' collectives: all state on devices between members that do not
        read each other's. Nothing, on all members alike, where another way was asked for.

        plan: this member's moves. kinds: the state kinds on devices, before and after. world: the next one, which is
        told whether it needs a communicator for that. SwitchRefused where that way was asked for and there is none.
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
        mine = len(split(plan(), self._far, kinds, kinds)[1])
        most = session.reduce("batches", mine, max, doing="finding the way between devices")
        world.moves_by_device = most > 0
        self.batching = Batching(self._far, kinds, most, budget_bytes) if most else None

    def sharing(self, kinds: frozenset[str]) -> Sharing | None:
        """Whose memory on accelerators this member reads, and who reads its own; None before neighbors are known.

        kinds: the state kinds whose present buffers are on accelerators.
        """
        memory, lenders = device_memory(compute_device()), self._lenders
        return Sharing(memory, lenders, kinds) if memory is not None and lenders else None

    def transport(self, world: World | None) -> Transport:
        """Over the host, between all members of both worlds; SwitchFailed if the next one has no groups."""
        if world is None or world.transfer is None:
            raise SwitchFailed("the groups of the next world are not there")
        stop = None if self.control.watch is None else self.stop
        group = GroupTransport(world.transfer, world.transfer_members, stop)
        if self.neighbors is None:
            return group
        self.neighbors.permit()
        return RoutedTransport(self.neighbors, group)

    def link(self, world: World | None, stop: Callable[[], None]) -> CommunicatorLink | None:
        """Between the devices of all members of both worlds, once these are connected; None where nothing goes so."""
        if self.batching is None or world is None or world.moving is None:
            return None
        return CommunicatorLink(world.moving, self.control.member, world.transfer_members, stop)

    def may_lend(self, old: World | None) -> Communicator | None:
        """The communicator of the old world that moves between devices go by, if they go by one of its; all members of
        the old world know it alike, also those that have not come to the moves.

        It serves for the new world, too, or connects those who leave it. Where members come and go none is kept.
        """
        if self.way not in ("auto", "nccl") or not can_send_between_devices() or old is None or old.status is not None:
            return None
        return old.communicators.get(("", self.proposal.union))

    def end(self) -> None:
        """Let no neighbor read this member any more."""
        if self.neighbors is not None:
            self.neighbors.close()
            self.neighbors = None

    @property
    def _lenders(self) -> frozenset[int]:
        """Those whose devices this member reads."""
        return frozenset() if self.neighbors is None else self.neighbors.lenders

    @property
    def _far(self) -> frozenset[int]:
        """All others."""
        return frozenset(self.proposal.union) - {self.control.member} - self._lenders

    def _share(self, what: str, record: Any) -> Mapping[int, Any]:
        """Tell all members on this machine a record, and read theirs."""
        board, key = self.control, f"{what}/{self.proposal.generation}"
        board.post(f"{key}/{board.member}", record)
        keys = {member: f"{key}/{member}" for member in self._on_machine}
        return board.wait(keys, "finding neighbors", stop=self.stop, longest=POLL_SECONDS, is_there=False)

    @cached_property
    def _on_machine(self) -> list[int]:
        """The members on this machine, this one too."""
        return self.control.read_list(self._machine)

    @property
    def _machine(self) -> str:
        """Where those on this machine are listed."""
        return f"machine/{self.proposal.generation}/{machine()}"
