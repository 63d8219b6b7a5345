"""Op rules of convolutions and spatial ops on NCHW tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxgrail.core import Ints
from onnxgrail.graph.attributes import integer
from onnxgrail.graph.ops.layers.contraction import BIAS, FIXED, contracted
from onnxgrail.graph.ops.rule import narrow, rule
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.rotate.marked import RANK
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

GROUPED = "a group of a grouped convolution goes as a whole"
EQUAL = "the groups of a grouped convolution keep equally many channels"
WIDE = 4  # times as many channels in a group as there are groups: then channels of all groups go, not whole groups
SHUFFLED = "groups, then a shuffle: channels of one group are dealt out to several groups of this convolution"


@rule("Conv", "ConvTranspose")
def conv(site: Site) -> None:
    """Consume axis 1 and produce axis 1; depthwise channels pass; remove whole groups, or as many channels of each."""
    site.emit(conv_marks(site))


def conv_marks(site: Site) -> list[Mark]:
    """Return the marks of a convolution's output."""
    if not site.is_constant(1):
        site.refuse("its weight is computed at run time")
        return []
    groups = int(site.attribute("group", 1))
    channels = site.shape(0)[1]
    fed = channels_of(site)
    labels: Ints | None
    if groups == 1:
        labels = _dense(site, fed)
    elif site.node.op_type == "Conv" and _evenly(site, fed, groups):
        labels = _within(site, fed, groups)
    elif fed is None:
        labels = None
    elif groups == channels:
        labels = _depthwise(site, fed, channels)
    else:
        labels = _grouped(site, fed, groups)
    if labels is None:
        return []
    bias = 3 if site.node.op_type == "DeformConv" else 2
    site.passenger(bias, labels, BIAS)
    return [Mark((1,), labels), *batch_of(site)]


def channels_of(site: Site) -> Ints | None:
    """Return the labels of axis 1; freeze marks on the spatial axes."""
    found = None
    for mark in site.marks(0):
        if 1 in mark.axes:
            found = site.collapse(mark, 1)
        elif mark.axes != (0,):
            site.freeze([mark], "a convolution mixes neighboring positions")
    return found


def batch_of(site: Site) -> list[Mark]:
    """Return the marks of the batch axis alone."""
    return [m for m in site.marks(0) if m.axes == (0,)]


def _dense(site: Site, fed: Ints | None) -> Ints:
    inward, outward = (0, 1) if site.node.op_type == "ConvTranspose" else (1, 0)
    consumed = contracted(site, 1, inward, 1, () if fed is None else (fed,))
    produced = site.weight(1, outward)
    site.carry(1, Mark((outward,), produced), "producer")
    site.kind(np.concatenate([consumed, produced]), "conv")
    if RANK in site.node.metadata_props:
        site.rank(consumed, "rank", site.node.metadata_props[RANK])
    return produced


def _depthwise(site: Site, fed: Ints, channels: int) -> Ints:
    """Pass the channels of a depthwise convolution, repeated by the channel multiplier."""
    labels = np.repeat(fed, site.out_shape()[1] // channels)
    site.carry(1, Mark((0,), fed if site.node.op_type == "ConvTranspose" else labels))
    site.kind(labels, "conv")
    return labels


def _evenly(site: Site, fed: Ints | None, groups: int) -> bool:
    """Return True if each group loses as many channels as the others.

    So do a few wide groups, and narrow ones of which none can go alone: what they read stays, or goes in all groups.
    """
    made, read = site.shape(1)[:2]
    if fed is None:
        return bool(made > groups)
    classes = site.flow.labels.find(fed.reshape(groups, -1))
    return min(made // groups, read) >= WIDE * groups or (read > 1 and bool((classes == classes[:1]).all()))


def _grouped(site: Site, fed: Ints, groups: int) -> Ints:
    """Tie each group's inputs, filters and outputs."""
    inputs = fed.reshape(groups, -1)
    tied = _dealt(site.flow.labels.find(inputs))
    if site.node.op_type == "ConvTranspose":  # the weight has the shape (inputs, outputs per group, ...)
        site.union(inputs[:, :1], inputs, tied)
        site.carry(1, Mark((0,), fed))
        site.kind(fed, "conv")
        return np.repeat(inputs[:, 0], site.shape(1)[1])
    outputs = site.weight(1, 0).reshape(groups, -1)
    site.union(inputs[:, :1], inputs, tied)
    site.union(inputs[:, :1], outputs, tied)
    site.carry(1, Mark((0,), outputs.ravel()))
    site.kind(outputs.ravel(), "conv")
    return outputs.ravel()


def _within(site: Site, fed: Ints | None, groups: int) -> Ints:
    """Consume and produce channels of a few wide groups, tied to those at the same place in the other groups."""
    consumed, produced = site.weight(1, 1), site.weight(1, 0)
    if fed is None:
        site.freeze([Mark((1,), consumed)], FIXED)
        fed = np.tile(consumed, groups)
    site.union(fed.reshape(groups, -1), consumed, EQUAL)
    site.carry(1, Mark((1,), consumed), "consumer", (site.name(0), 1))
    site.meets(fed)
    rows = produced.reshape(groups, -1)
    site.union(rows[:1], rows, EQUAL)
    site.carry(1, Mark((0,), produced), "producer")
    site.kind(np.concatenate([consumed, produced]), "conv")
    return produced


def _dealt(inputs: Ints) -> str:
    """Return why the groups depend on each other; `inputs` holds the label classes of each group's channels."""
    classes = [np.unique(row) for row in inputs]
    shared = np.unique(np.concatenate(classes)).size < sum(map(len, classes))
    return SHUFFLED if shared and len(classes) > 1 else GROUPED


@narrow("Conv", "ConvTranspose", "DeformConv")
def narrow_conv(cut: Cut) -> None:
    """Update `group` of a depthwise or grouped convolution from its input channels."""
    if integer(cut.node, "group", 1) > 1:
        cut.recount("group", cut.input_name(0), 1)


@rule(
    "MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "Resize", "Upsample",
    "Crop",  # of the first opsets, as Core ML converters write it
)  # fmt: skip
def spatial(site: Site) -> None:
    """Pass axis 1."""
    labels = channels_of(site)
    marks = batch_of(site)
    if site.out_shape()[0] != site.shape(0)[0]:
        site.freeze(marks, "it resizes the batch axis")
        marks = []
    if labels is not None and site.out_shape()[1] != len(labels):
        site.freeze([Mark((1,), labels)], "it resizes the channel axis")
        labels = None
    if labels is not None:
        marks.append(Mark((1,), labels))
    if site.node.op_type == "MaxPool" and site.out_name(1):
        site.freeze(marks, "its indices number the channels")
    site.emit(marks)


@narrow("Resize")
def narrow_resize(cut: Cut) -> None:
    """Update the channel count in a `sizes` operand."""
    stays = cut.alive(cut.output_name()).get(1)
    name = cut.input_name(3)
    if stays is None or not name or name not in cut.facts.values:
        return
    sizes = np.array(cut.facts.values[name])
    if sizes.size == len(cut.shape(cut.output_name())):
        sizes[1] = int(stays.sum())
        if name in cut.facts.constants:
            cut.set_operand(3, sizes, "sizes")
        else:  # spatial sizes depend on the input and stay computed
            cut.compute_operand(3, "Where", [np.arange(sizes.size) == 1, sizes, cut.operand(3)], "sizes")


@rule("DeformConv", since=19)
def deformable(site: Site) -> None:
    """Pass as Conv if all channels share their offsets; refuse several offset groups."""
    for operand in (2, 4):
        if site.name(operand):
            site.freeze(site.marks(operand), "it reads them as coordinates")
    if int(site.attribute("offset_group", 1)) > 1:
        site.freeze(site.marks(0), "each group of its channels has offsets of its own")
    site.emit(conv_marks(site))


@rule("DepthToSpace")
def depth_to_space(site: Site) -> None:
    """Tie each block of r*r channels, which becomes one channel."""
    block, rows = int(site.attribute("blocksize")) ** 2, site.attribute("mode", "DCR") == "CRD"
    shuffle(site, lambda labels: labels.reshape(-1, block) if rows else labels.reshape(block, -1).T)


@rule("SpaceToDepth")
def space_to_depth(site: Site) -> None:
    """Repeat each channel to a block of r*r channels."""
    size = int(site.attribute("blocksize"))
    shuffle(site, lambda labels: np.tile(labels, size * size))


def shuffle(site: Site, move: Callable[[Ints], Ints]) -> None:
    """Exchange channels and space; `move` returns the labels of each new channel, or all that meet in it."""
    labels = channels_of(site)
    marks = batch_of(site)
    if labels is not None:
        moved = move(labels)
        if moved.ndim > 1:
            site.union(moved[:, :1], moved)
            moved = moved[:, 0]
        marks.append(Mark((1,), moved))
    site.emit(marks)
