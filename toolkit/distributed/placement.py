"""Which processes divide what, and over how many machines, in words."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.distributed.layout import World
from toolkit.recipe import Recipe

_WAYS = {
    "tensor": "divide each layer",
    "sequence": "share each row",
    "context": "share each row",
    "expert": "divide the experts",
}


def placement(recipe: Recipe, world: World) -> Iterator[tuple[str, bool]]:
    """A line for each way in which `parallel` divides something, and whether it sends in every layer over the network
    between machines.

    Ranks are numbered machine by machine. Neighbours divide layers, rows or experts; a pipeline goes from one run of
    ranks to the next, so from machine to machine as soon as there are several.
    """
    parallel, width = recipe.parallel, world.local_world_size
    for way, what in _WAYS.items():
        if (size := getattr(parallel, way)) > 1:
            # Those that share rows are as far apart as there are processes that divide layers.
            reach = size * parallel.tensor if way in ("sequence", "context") else size
            firsts = range(0, world.world_size, reach)
            machines = max((first + reach - 1) // width - first // width + 1 for first in firsts)
            apart = f", {parallel.tensor} ranks apart" if reach > size else ""
            where = (
                "on one machine" if machines == 1 else f"over {machines} machines, whose network every layer waits for"
            )
            yield f"parallel.{way}={size}: {size} neighbouring processes {what}{apart}, {where}", machines > 1
    if parallel.pipeline > 1:
        each = world.world_size // parallel.pipeline
        runs = [range(first, first + each) for first in range(0, world.world_size, each)]
        ranks = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        where = "from machine to machine" if world.num_nodes > 1 else "on one machine"
        yield f"parallel.pipeline={parallel.pipeline}: layers lie on ranks {ranks}, one after the other, {where}", False
