"""Layouts by name, with a hint where a name is unknown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch.fx import GraphModule

from partir.errors import UnknownNameError, module_path
from partir.layout import Layout
from partir.program import Slot


class Layouts(Mapping[str, Layout]):
    """Layouts by name: dotted for parameters and modules of one value, as in `plan.text("annotated")` for the rest."""

    def __init__(self, known: Mapping[str, Layout]) -> None:
        self._known = dict(known)

    def __getitem__(self, name: str) -> Layout:
        if name not in self._known:
            raise UnknownNameError.of("parameter, input or value", name, self._known)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def layouts_by_name(annotated: GraphModule, inputs: Iterable[Slot], aliases: Mapping[str, str]) -> Layouts:
    """Return the layout at rest of each parameter, input and value.

    Args:
        annotated: the graph with layouts, sizes global.
        inputs: the slots of its program.
        aliases: further names of tied parameters.
    """
    nodes = [n for n in annotated.graph.nodes if n.op == "call_function" and isinstance(n.meta.get("layout"), Layout)]
    paths: dict[str, list[Layout]] = {}
    for node in nodes:
        paths.setdefault(module_path(node.meta), []).append(node.meta["layout"])
    modules = {path: found[0] for path, found in paths.items() if path and len(found) == 1}
    slots = {slot.name: slot.layout for slot in inputs}
    tied = {name: slots[first] for name, first in aliases.items() if first in slots}
    return Layouts({**modules, **{n.name: n.meta["layout"] for n in nodes}, **tied, **slots})
