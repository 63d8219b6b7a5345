"""Op rules of detection and image ops that work on space and pass axis 1."""

from __future__ import annotations

from onnxgrail.graph.attributes import MICROSOFT
from onnxgrail.graph.ops.layers.conv import batch_of, channels_of, shuffle
from onnxgrail.graph.ops.rule import refused, rule
from onnxgrail.graph.ops.tensors.reduce import mix
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

WHERE = "it reads them as coordinates"
NUMBERED = "its indices number the channels"


@rule("GridSample", since=16)
@rule("GridSample", domain=MICROSOFT)
@rule("RoiAlign", since=10)
@rule("MaxRoiPool")
def sampled(site: Site) -> None:
    """Pass axis 1; coordinates have no channels."""
    for operand in site.operands[1:]:
        site.freeze(site.marks(operand), WHERE)
    labels = channels_of(site)
    whole = batch_of(site)
    if site.node.op_type != "GridSample":
        site.freeze(whole, "it deals out the samples of the batch")
        whole = []
    site.emit([*whole, Mark((1,), labels)] if labels is not None else whole)


refused("AffineGrid", why=WHERE, told="Refuse: the output holds coordinates.", since=20)
refused("MaxUnpool", why=NUMBERED, told="Refuse: the indices count through all channels.", since=9)


@rule("Col2Im", since=18)
def column_to_image(site: Site) -> None:
    """Tie the taps of each kernel window, which become one channel."""
    shuffle(site, lambda labels: labels.reshape(site.out_shape()[1], -1))


@rule("MeanVarianceNormalization", since=9)
def mean_variance(site: Site) -> None:
    """Tie the normalized axes; pass the others."""
    rank = len(site.shape(0))
    axes = {int(a) % rank for a in site.attribute("axes", (0, 2, 3))}
    site.emit(mix(site, site.marks(0), axes))


@rule("CenterCropPad", since=18)
def center_crop(site: Site) -> None:
    """Pass the axes that it does not name."""
    rank = len(site.shape(0))
    named = {int(a) % rank for a in site.attribute("axes", range(rank))}
    site.freeze([m for m in site.marks(0) if named & set(m.axes)], "it sets the size of the channel axis")
    site.emit(m for m in site.marks(0) if not named & set(m.axes))
