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

    @property
    def until(self) -> float:
        """When it ends, on the caller's clock."""
        return self._until if self._told else max(self._until, self._patience)

    @property
    def is_complete(self) -> bool:
        """Whether nobody else of the newest world can come back."""
        world = self.choose()
        return world is not None and self._told.keys() >= {*world.members, *world.leaving}

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

    def choose(self) -> World | None:
        """The newest world that anybody was told of, of two with one number the one that more know; None if there is
        none. Members that were told of an older one, or of none, are told of this one next."""
        if not self._told:
            return None
        votes = Counter((world.generation, world.term) for world in self._told.values())
        generation, term = max(votes, key=lambda name: (name[0], votes[name], name[1]))
        return next(world for world in self._told.values() if (world.generation, world.term) == (generation, term))

    def heard_of(self, member: str) -> bool:
        """Whether a member came with a world."""
        return member in self._told
