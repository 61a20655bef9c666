"""Who waits for whom: no CTA waits, directly or through others, for what it does later itself.

All CTAs are resident at once and each runs its own list in order, so a wait can only fail to end if waits go in a
circle. A graph of instructions and of what they wait for shows whether they do, whatever the CTAs' speeds.
"""

from __future__ import annotations

from megakernel_runtime.program.isa import Op
from megakernel_runtime.program.validate.dataflow import Step
from megakernel_runtime.program.validate.image import MATRIX_OPS, Part, ProgramError, Region


class _Graph:
    """Events by number, and for each the events that must come after it."""

    def __init__(self) -> None:
        self.names: list[tuple[str, Part | Region | Step]] = []
        self._after: list[list[int]] = []
        self._n_before: list[int] = []

    def event(self, what: str, of: Part | Region | Step) -> int:
        """Add an event."""
        self.names.append((what, of))
        self._after.append([])
        self._n_before.append(0)
        return len(self.names) - 1

    def order(self, before: int, after: int) -> None:
        """Say that `after` waits for `before`."""
        self._after[before].append(after)
        self._n_before[after] += 1

    def circle(self) -> list[int]:
        """Return events that wait for each other in a circle, in order; empty if there are none."""
        left = list(self._n_before)
        ready = [event for event, n in enumerate(left) if not n]
        for event in ready:
            for later in self._after[event]:
                left[later] -= 1
                if not left[later]:
                    ready.append(later)
        stuck = {event for event, n in enumerate(left) if n}
        if not stuck:
            return []
        before = {later: event for event in stuck for later in self._after[event] if later in stuck}
        path = [min(stuck)]
        while (event := before[path[-1]]) not in path:
            path.append(event)
        return [*path[path.index(event) :], event]


def check_waits(parts: list[list[Part]], regions: dict[Step, Region]) -> None:
    """Every wait ends: for activations, partial results and counters."""
    graph = _Graph()
    wholes = {step: graph.event("all of", region) for step, region in regions.items()}
    by_start = {region.start: wholes[step] for step, region in regions.items()}
    shared = {step: graph.event("everybody's half of", step) for step in _halved(parts[0])}
    for own in parts:
        previous = graph.event("the start of the step before", own[0])
        for part in own:
            for event in _events(graph, part, wholes, by_start, shared):
                graph.order(previous, event)
                previous = event
    circle = [f"{what} {_name(of)}" for what, of in (graph.names[event] for event in graph.circle())]
    if circle:
        raise ProgramError(f"waits go in a circle: {', which waits for '.join(circle)}")
    _check_partials(parts[0], {region.start: region for region in regions.values()})


def _name(of: Part | Region | Step) -> str:
    return f"{of[0].name} of layer {of[1]}" if isinstance(of, tuple) else str(of)


def _halved(parts: list[Part]) -> list[Step]:
    """Instructions whose second half waits for the first half of all CTAs."""
    return [(part.op, part.layer) for part in parts if part.op in {Op.ATTEND, Op.SAMPLE}]


def _events(
    graph: _Graph, part: Part, wholes: dict[Step, int], by_start: dict[int, int], shared: dict[Step, int]
) -> list[int]:
    """Add what `part` waits for and what waits for it; return its events in order.

    ATTEND writes its partial results before it waits for others', SAMPLE signals before it waits for others' signals.
    """
    step = (part.op, part.layer)
    if step in shared:
        mine, others = graph.event("first half of", part), graph.event("second half of", part)
        graph.order(mine, shared[step])
        graph.order(shared[step], others)
        if part.op is Op.ATTEND:
            graph.order(wholes[Op.QKV, part.layer], mine)
            graph.order(others, wholes[step])
        return [mine, others]
    event = graph.event("", part)
    if part.op in MATRIX_OPS and part.count:
        graph.order(by_start[part.source], event)
    if part.count and step in wholes:
        graph.order(event, wholes[step])
    return [event]


def _check_partials(parts: list[Part], by_start: dict[int, Region]) -> None:
    """All layers share the words of partial results: a layer's may be written only after the one before was merged.

    A CTA writes them once it has queries, so QKV of a layer must depend on attention's output of the layer before,
    which nobody has before it has merged.
    """
    source = {(part.op, part.layer): by_start[part.source] for part in parts if part.op in MATRIX_OPS}
    for part in parts:
        if part.op is Op.QKV and part.layer:
            region = source[part.op, part.layer]
            while region.op in MATRIX_OPS and region.op is not Op.QKV:
                region = source[region.op, region.layer]
            if (region.op, region.layer) != (Op.ATTEND, part.layer - 1):
                raise ProgramError(f"{part} does not depend on attention of layer {part.layer - 1}")
