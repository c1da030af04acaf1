"""What a coordinator that was started anew learns from the members of a job that went on without it."""

from __future__ import annotations

from collections import Counter

from ds_dynatrain.elastic.world import World


class Recovery:
    """Collects the worlds that members say they were told of; then one of them is the world.

    It ends when all members of that world have come back, or `seconds` after the last one that did. Where nobody has
    yet, though somebody may still, it goes on until `patience`.
    """

    def __init__(self, until: float, seconds: float) -> None:
        self._until = until
        self._seconds = seconds
        self._patience = until
        self._told: dict[str, World] = {}
        self._worlds: dict[tuple[int, bool, str], World] = {}
        self._votes: Counter[tuple[int, bool, str]] = Counter()
        self._reported: set[str] = set()

    @property
    def until(self) -> float:
        """When it ends at the latest, on the caller's clock."""
        return self._until if self._told else max(self._until, self._patience)

    @property
    def is_complete(self) -> bool:
        """Whether nobody else of the newest world can come back, and all have said what they are."""
        world = self.choose()
        if world is None or len(self._reported) < len(world.members) + len(world.leaving):
            return False
        return self._reported >= {*world.members, *world.leaving}

    def expect(self, patience: float) -> None:
        """There was a job before: until then, its members may come back."""
        self._patience = max(self._patience, patience)

    def forgive(self, seconds: float) -> None:
        """Count `seconds` less: nobody was listening."""
        self._until += seconds

    def hear(self, member: str, world: World, now: float) -> None:
        """Take the newest world that a member was told of."""
        self._until = max(self._until, now + self._seconds)
        self._told[member] = world
        name = world.generation, world.begun, world.term
        self._worlds.setdefault(name, world)
        self._votes[name] += 1

    def report(self, member: str) -> None:
        """A member that is there has said what it is."""
        if member in self._told:
            self._reported.add(member)

    def has_reported(self, member: str) -> bool:
        """Whether it has said what it is."""
        return member in self._reported

    def choose(self) -> World | None:
        """The newest world that anybody was told of; of two with one number that of the job in which somebody has made
        a step, or else that more know; None if there is none. Members that were told of an older one, or of none, are
        told of this one next."""
        if not self._worlds:
            return None
        return self._worlds[max(self._worlds, key=lambda name: (name[0], name[1], self._votes[name], name[2]))]

    def told(self, member: str) -> World | None:
        """The newest world that a member knew of when it came back; None if it did not."""
        return self._told.get(member)

    def heard_of(self, member: str) -> bool:
        """Whether a member came with a world."""
        return member in self._told
