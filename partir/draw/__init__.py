"""Draw what moves in a plan: as a graphviz graph, as a picture file, or as a page for the browser.

    weight --> (all_gather x) --> [linear]   <-- (all_gather y) <-- [layer_norm]

One cluster a module, repeated layers drawn once; collectives coloured by axis and as wide as their bytes, the costliest numbered.
The forward is one cluster, the backward another, dashed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import graphviz  # pyright: ignore[reportMissingTypeStubs]

from partir.draw.bundle import bundle
from partir.draw.collect import collect
from partir.draw.dot import digraph
from partir.draw.fold import fold as fold_layers
from partir.draw.picture import Picture
from partir.draw.webpage import page
from partir.draw.write import PAGE, TEXT, rendered, suffix_of, write_atomically
from partir.paths import path_of_file

if TYPE_CHECKING:
    from partir.plans import Plan


def picture_of(plan: Plan, fold: bool = True) -> Picture:
    """Return what a drawing of a plan shows."""
    picture = bundle(collect(plan))
    return fold_layers(picture) if fold else picture


def draw(plan: Plan, fold: bool = True) -> graphviz.Digraph:
    """Return the drawing of a plan: the `dot` program is not needed for its source.

    Args:
        plan: of any model; two plans of one model give identical text.
        fold: draw repeated layers once.
    """
    return digraph(plan, picture_of(plan, fold))


def save(plan: Plan, path: str | Path, fold: bool = True) -> None:
    """Write the drawing of a plan: .svg, .png and .pdf need the program `dot`, .dot, .gv and .html none.

    Args:
        plan: of any model.
        path: where; its suffix says what.
        fold: draw repeated layers once.

    Raises:
        PartirError: another suffix, a path that cannot be written, or no program `dot`.
    """
    target = path_of_file(path, "the drawing", "plan.svg")
    suffix = suffix_of(target)
    picture = picture_of(plan, fold)
    if suffix in PAGE:
        content = page(plan, picture).encode()
    elif suffix in TEXT:
        content = digraph(plan, picture).source.encode()
    else:
        content = rendered(digraph(plan, picture), suffix[1:])
    write_atomically(target, content)
