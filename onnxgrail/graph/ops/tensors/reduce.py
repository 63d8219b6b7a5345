"""Op rules that mix an axis: reductions, softmax, normalizations.  The positions of a mixed axis are tied."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxgrail.graph.attributes import number
from onnxgrail.graph.ops.rule import narrow, refused, rule
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.rotate.marked import INSIDE, LEFT, PLAIN, is_rotated
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

PARAMETERS = "its parameters are computed at run time"
GROUP = "a group of the norm goes as a whole"
MIXED = "it mixes the whole channel axis, so the width after it is fixed"


def mix(site: Site, marks: tuple[Mark, ...], axes: set[int], reason: str = MIXED) -> list[Mark]:
    """Return the marks after tying everything along the given axes, or without these if what stays is mixed."""
    if LEFT in site.node.metadata_props:
        return [m for m in marks if not axes & set(m.axes)]
    tied = (site.tie(m, sorted(axes), reason) if axes & set(m.axes) else m for m in marks)
    return [m for m in tied if m is not None]


@rule(
    "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceProd", "ReduceSumSquare",
    "ReduceLogSum", "ReduceLogSumExp", "ArgMax", "ArgMin",
)  # fmt: skip
def reduce(site: Site) -> None:
    """Tie the reduced axes, except of means where fits repair them; pass the others."""
    rank = len(site.shape(0))
    if site.node.op_type.startswith("Arg"):
        axes = {int(site.attribute("axis", 0)) % rank}
    else:
        given = site.attribute("axes")
        if given is None and site.name(1):
            value = site.value(1)
            if value is None:
                site.freeze(site.marks(0), "its axes are computed at run time")
                return
            given = value.ravel().tolist()
        if not given and site.attribute("noop_with_empty_axes", 0):
            site.emit(site.marks(0))
            return
        axes = {int(a) % rank for a in given} if given else set(range(rank))
    gone = () if site.attribute("keepdims", 1) else sorted(axes)
    site.emit(
        Mark(tuple(a - sum(g < a for g in gone) for a in m.axes), m.labels) for m in mix(site, site.marks(0), axes)
    )


@rule("Softmax", "LogSoftmax", "Hardmax")
def softmax(site: Site) -> None:
    """Tie the normalized axis; pass the others."""
    rank = len(site.shape(0))
    axis = int(site.attribute("axis", -1 if site.version >= 13 else 1)) % rank
    axes = {axis} if site.version >= 13 else set(range(axis, rank))
    site.emit(mix(site, site.marks(0), axes))


@rule("CumSum")
@rule("CumProd", since=26)
def cumulative(site: Site) -> None:
    """Tie the accumulated axis; pass the others."""
    axis = site.value(1)
    rank = len(site.shape(0))
    site.emit(mix(site, site.marks(0), set(range(rank)) if axis is None else {int(axis.ravel()[0]) % rank}))


@rule("LpNormalization")
def lp_normalisation(site: Site) -> None:
    """Tie the normalized axis; pass the others."""
    site.emit(mix(site, site.marks(0), {int(site.attribute("axis", -1)) % len(site.shape(0))}))


@rule("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def layer_normalisation(site: Site) -> None:
    """Tie the normalized axes, except of hidden channels where fits repair them; pass the leading axes (heads)."""
    rank = len(site.shape(0))
    axis = int(site.attribute("axis", -1)) % rank
    if is_rotated(site.node):
        _rotated(site, axis)
        return
    if LEFT in site.node.metadata_props:
        for mark in (mark for mark in site.marks(0) if axis in mark.axes):
            _parameters(site, mark, axis, range(1, len(site.node.inputs)))
        site.emit(site.marks(0))
        return
    passing = mix(site, site.marks(0), set(range(axis, rank)))
    for output in range(len(site.node.outputs)):
        site.emit(passing, output)


def _rotated(site: Site, axis: int) -> None:
    """Pass all axes; the root mean square of the channels that are left is taken over the old width."""
    for mark in site.marks(0):
        if axis in mark.axes:
            labels = site.collapse(mark, axis)
            if INSIDE not in site.node.metadata_props:
                site.kind(labels, "stream")
            site.carry(1, Mark((0,), labels), scaled=True)
    site.emit(site.marks(0))


@narrow(PLAIN)
def narrow_rotated(cut: Cut) -> None:
    """Enlarge epsilon after a rotation by as much as the mean over fewer channels is larger; the gain by its root."""
    stays = cut.alive(cut.input_name(0)).get(len(cut.shape(cut.input_name(0))) - 1)
    if stays is not None and is_rotated(cut.node):
        cut.node.attributes["epsilon"] = ir.AttrFloat32("epsilon", number(cut.node, "epsilon") / stays.mean())


def _parameters(site: Site, mark: Mark, axis: int, operands: Iterable[int]) -> None:
    """Cut these operands, with one value per channel of an axis, with the channels."""
    labels = site.collapse(mark, axis)
    for k in operands:
        site.passenger(k, labels, PARAMETERS)


@rule("BatchNormalization")
def batch_normalisation(site: Site) -> None:
    """Pass axis 1; cut scale, bias, mean and variance."""
    for mark in site.marks(0):
        if 1 in mark.axes:
            _parameters(site, mark, 1, range(1, 5))
    site.emit(site.marks(0))


@rule("InstanceNormalization")
def instance_normalisation(site: Site) -> None:
    """Pass axis 1 with scale and bias; tie the spatial axes, so the groups of a group norm stay whole."""
    rank = len(site.shape(0))
    left = LEFT in site.node.metadata_props
    passing = [*site.marks(0)] if left else mix(site, site.marks(0), set(range(2, rank)))
    for mark in passing:
        if 1 in mark.axes:
            _parameters(site, mark, 1, (1, 2))
    site.emit(passing)


@rule("GroupNormalization", since=18)
def group_normalisation(site: Site) -> None:
    """Tie the channels of each norm group."""
    groups = int(site.attribute("num_groups"))
    for mark in site.marks(0):
        if 1 not in mark.axes:
            continue
        labels = site.collapse(mark, 1)
        table = labels.reshape(groups, -1)
        if LEFT not in site.node.metadata_props:
            site.union(table[:, :1], table, GROUP)
        for k in (1, 2):
            site.passenger(k, labels if site.shape(k) == labels.shape else table[:, 0], PARAMETERS)
    site.emit(mix(site, site.marks(0), set(range(2, len(site.shape(0))))))


@narrow("GroupNormalization")
def narrow_group_normalisation(cut: Cut) -> None:
    """Update the number of groups."""
    if LEFT not in cut.node.metadata_props:
        cut.recount("num_groups", cut.input_name(0), 1)


refused("LRN", why="it mixes neighboring channels", told="Refuse: it mixes neighboring channels.")


@rule("Shape", "Size", "NonZero", "Range", "ConstantOfShape", "EyeLike")
def sizes(site: Site) -> None:
    """Emit no channels; sizes that depend on a width are corrected by their readers."""
    if site.node.op_type == "NonZero":
        site.freeze(site.marks(0), "it lists where there are nonzero values, by number")
