"""Completes, at the start of a run on several machines, a checkpoint of which each of them still holds a part.

The machines were killed while they copied it from their fast folders. Each says what it holds; if that is all of it,
each copies its own part, and the first process makes the checkpoint count.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.common import UserError, in_a_line
from toolkit.distributed.rendezvous import Rendezvous
from toolkit.recipe import Recipe
from toolkit.train.checkpoints import fast_folder
from toolkit.train.checkpoints.storage import unwritable


class LeftParts:
    """What the machines of a launch hold together. Every process has one.

    Args:
        target: The folder, in the run folder, into which checkpoints are copied.
    """

    def __init__(self, rendezvous: Rendezvous, recipe: Recipe, target: Path) -> None:
        self._rendezvous, self._recipe, self._target = rendezvous, recipe, target
        self._met = rendezvous.world.num_nodes == 1

    def take(self, recipe: Recipe, target: Path) -> dict[str, Any] | None:
        """As `fast_folder.take_left`, for the first process, while the others `attend`.

        Raises:
            UserError: If a machine could not copy its part, or it does not come.
        """
        if self._met:
            return fast_folder.take_left(recipe, target)
        return self._meet(wanted=True)

    def attend(self) -> None:
        """What all other processes do meanwhile; the first one calls it when it is done."""
        if not self._met:
            self._meet(wanted=False)

    def _meet(self, wanted: bool) -> dict[str, Any] | None:
        self._met = True
        with fast_folder.held(self._recipe, self._target) as held:
            return self._copy(wanted, held)

    def _copy(self, wanted: bool, held: str) -> dict[str, Any] | None:
        rank = self._rendezvous.world.rank
        found: list[dict[str, Any]] = []

        def copiers(parts: Mapping[int, str]) -> dict[str, int]:
            values = fast_folder.whole(self._target, parts.values()) if wanted else None
            if not values:
                return {}
            found.append(values)
            return {part: other for other, part in parts.items() if part}

        copying: dict[str, int] = self._rendezvous.exchange("left parts", held, copiers)
        if not copying:
            return None
        error = ""
        if copying.get(held) == rank:
            try:
                fast_folder.copy_left(self._recipe, self._target, held)
            except OSError as failure:
                error = in_a_line(unwritable(self._target.parent.parent, failure, writing=True) or failure)
        errors = self._rendezvous.exchange("copied parts", error, lambda values: [*filter(None, values.values())])
        if rank:
            return None
        if errors:
            raise UserError(errors[0], "free the disk, or give back the right to write; then try again")
        fast_folder.await_left(self._target)
        return found[0]
