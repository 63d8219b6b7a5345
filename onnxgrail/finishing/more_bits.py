"""More bits for some weights of a model that loses too much in the bits that a search has chosen.

The search judges fits to parts of the data.  The fit to all data has other numbers, whose rounding can lose more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnxgrail.graph.bits.folded import HALF
from onnxgrail.graph.bits.plan import FLOAT, TABLE
from onnxgrail.graph.rewrite.unique import origin
from onnxgrail.narrowing.bits.rounding import Bits


def holding(
    made: Bits, slim: ir.Model, again: Callable[[Mapping[str, int]], Bits], holds: Callable[[ir.Model], bool]
) -> Bits:
    """Return the model with the fewest more bits with which it loses little enough; as it is if that needs none.

    The smallest weights get 8 bits first, then all, and then 16 in the same order; the place is found by bisection.

    Args:
        made: the model in the chosen bits.
        slim: the model in float.
        again: rounds it once more, to other bits by weight.
        holds: returns True if a model loses little enough.

    Returns:
        `made` if no number of bits is enough.
    """
    if holds(made.model):
        return made
    tensors = {origin(name): value.const_value for name, value in slim.graph.initializers.items()}
    sizes = {name: tensor.size for name, tensor in tensors.items() if tensor is not None}
    now = {origin(one.weight): one.bits for one in made.entries} | {one.value: FLOAT for one in made.left}
    order = sorted(now, key=lambda name: sizes.get(name, 0))
    steps = [(name, few) for few in (TABLE, HALF) for name in order if now[name] < few]
    least, most, best = 1, len(steps), made
    while least <= most:
        middle = (least + most) // 2
        found = again({**now, **dict(steps[:middle])})
        if holds(found.model):
            best, most = found, middle - 1
        else:
            least = middle + 1
    return best
