"""Op rule of a choice between the flattened branches of an If."""

from __future__ import annotations

from onnxgrail.graph.ops.rule import rule
from onnxgrail.graph.ops.tensors.broadcast import combine, operand
from onnxgrail.graph.trace.facts import CHOICE, OWN
from onnxgrail.graph.trace.flow import Site

UNLIKE = "the branches of {} make tensors of different shapes"


@rule(CHOICE, domain=OWN)
def choice(site: Site) -> None:
    """Tie channels that leave an If across its branches; a constant returned by one branch is cut."""
    count = len(site.node.outputs)
    site.marks(0)
    for output in range(count):
        sides = (1 + output, 1 + count + output)
        shape = site.out_shape(output)
        if any(_unlike(site, k, shape) for k in sides):
            name = site.node.name or site.key
            site.freeze([mark for k in sides for mark in site.marks(k)], UNLIKE.format(name))
        else:
            site.emit(combine(site, [operand(site, k, len(shape)) for k in sides], shape), output)


def _unlike(site: Site, position: int, shape: tuple[int, ...]) -> bool:
    """Return True if a branch differs from the output in its rank, or in the size of an axis with channels."""
    own = site.shape(position)
    axes = {axis for mark in site.marks(position) for axis in mark.axes}
    return len(own) != len(shape) or any(own[axis] != shape[axis] for axis in axes)
