"""What gathers until whoever asks takes it."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class Gathered(list[T]):
    """A list whose entries are taken once, in their order."""

    def take(self) -> list[T]:
        """What has gathered since the last call."""
        taken = self[:]
        self.clear()
        return taken
