"""From an assignment of operators to devices to segments that can run one after another. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.graph.plan import Segment
from hearth.graph.spec import GraphSpec


def cut(spec: GraphSpec, assignment: Sequence[int], *, eager: bool = False) -> tuple[Segment, ...]:
    """Segments in an order in which they can run; `assignment` gives each operator's rank.

    As few as possible; with `eager`, no result waits for an operator that it does not depend on.
    """
    raise NotImplementedError
