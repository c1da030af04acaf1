"""How long a loop stays with the other engines of a process between two global batches of the first one.

After a death all of them are void until the first one begins its next batch. A loop that counts batches comes there;
one that goes on until another engine has made its steps never does, since a void batch makes none. It is told so.
"""

from __future__ import annotations

from collections import Counter

from ds_dynatrain.errors import WorldChanged

SPARE = 1000
"""Void batches that no earlier round accounts for: there may have been none."""


class Rounds:
    """Of one process. Engines are known by their numbers."""

    def __init__(self) -> None:
        self._now: Counter[int] = Counter()
        self._most: Counter[int] = Counter()

    def begin(self) -> None:
        """The first engine stands at a boundary."""
        self._most |= self._now
        self._now.clear()

    def stay(self, engine: int, is_void: bool) -> None:
        """Another one does. is_void: whether nothing is trained before the first engine's next batch.

        WorldChanged where the loop has stayed far longer than ever before, and nothing was trained.
        """
        self._now[engine] += 1
        if is_void and self._now[engine] > 2 * self._most[engine] + SPARE:
            raise WorldChanged(
                f"the world was torn and formed anew; since then the script has asked engine {engine} for "
                f"{self._now[engine]} batches, which are void, and never came to the next batch of the engine that was "
                f"made first (before, it did after {self._most[engine]} at most): a loop over another engine has to "
                "end after a number of batches, not of steps"
            )
