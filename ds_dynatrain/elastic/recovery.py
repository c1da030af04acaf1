"""What a coordinator that was started anew learns from the members of a job that went on without it."""

from __future__ import annotations

from collections import Counter

from ds_dynatrain.elastic.world import World


class Recovery:
    """Collects the worlds that members say they were told of, for a while; then one of them is the world."""

    def __init__(self, until: float, seconds: float) -> None:
        self._until = until
        self._seconds = seconds
        self._told: dict[str, World] = {}

    @property
    def until(self) -> float:
        """When it ends, on the caller's clock: late enough for everybody to come back after the first one did."""
        return self._until

    def hear(self, member: str, world: World, now: float) -> None:
        """Take the newest world that a member was told of."""
        if not self._told:
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
