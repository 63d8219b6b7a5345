"""The conformance oracle: a narrowed model equals the original whose consumers' dropped positions are zero.

The mask (`tests/masks.py`) is written from the survey alone and shares no code with the rewriter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Array, Bools, Feed, Kind
from onnxgrail.graph.io.running.widen import widen
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.stored.looked_up import lookups_of
from onnxgrail.graph.trace.survey import Ledger, Survey
from onnxgrail.graph.trace.tracer import trace
from tests.masks import masked

TOLERANCE = 1e-5
EFFECT = 1e-4  # a mask that changes less than this would also let a wrong rewrite pass


def prepared_of(model: ir.Model, survey: Survey, batches: Batches) -> Prepared:
    """Return what preparing a model gives, from its parts."""
    return Prepared(path=None, model=model, batches=batches, survey=survey, feed=batches.first())


def narrowed_equals_masked(
    model: ir.Model,
    feed: Feed,
    ratio: float = 0.5,
    kinds: Sequence[Kind] | None = None,
    *,
    seed: int = 0,
    interface: bool = False,
) -> Survey:
    """Kill some units of every block (of these kinds), and compare with the mask on the feed and on a shorter batch.

    Checked along the way: each block's mask has an effect; what the narrowed file says about shapes is true; it passes
    the ONNX checker where the original does; nothing changes when nothing is killed.
    """
    survey = survey_of(model, feed, interface=interface)
    assert len({b.name for b in survey.blocks}) == len(survey.blocks)
    before = ir.to_proto(model).SerializeToString()
    untouched = narrowed(model, survey, np.zeros(survey.ids, dtype=bool))
    assert ir.to_proto(untouched).SerializeToString() == before
    dead = killed(survey, ratio, kinds, seed)
    if not dead.any():
        return survey
    slim = narrowed(model, survey, dead)
    check_stored(model, slim)
    if all(s.initializer in model.graph.initializers for b in survey.blocks for s in b.slots):
        assert size(slim) < size(model)
    runs = [session(m) for m in (model, slim, masked(model, survey, dead))]
    cut = {n: cuts(survey, dead, n) for n in (v.name for v in (*model.graph.inputs, *model.graph.outputs))}
    assert interface or not any(cut.values())
    dense, want = run(runs[0], feed), run(runs[2], feed)
    check_same(run(runs[1], trimmed(feed, cut)), trimmed(want, cut))
    check_effects(model, survey, dead, feed, dense)
    shorter = short(feed)
    if shorter is not None and takes(runs[0], shorter):
        check_same(run(runs[1], trimmed(shorter, cut)), trimmed(run(runs[2], shorter), cut))
    check_recorded(slim, trimmed(feed, cut))
    if passes_checker(before):
        onnx.checker.check_model(ir.to_proto(slim), full_check=True)
    return survey


def cuts(survey: Survey, dead: Bools, name: str) -> list[tuple[int, Array]]:
    """Axes of an input or output that lose positions, with those that stay."""
    found = [(m.axes[0], np.flatnonzero(~dead[m.labels])) for m in survey.marks.get(name, ())]
    return [(axis, stays) for axis, stays in found if len(stays) < survey.facts.shapes[name][axis]]


def trimmed(arrays: Feed, cut: Mapping[str, list[tuple[int, Array]]]) -> dict[str, Array]:
    """Arrays without the positions that a narrowed interface no longer has."""
    found = {}
    for name, whole in arrays.items():
        array = whole
        for axis, stays in cut.get(name, ()):
            array = np.take(array, stays, axis=axis)
        found[name] = array
    return found


def check_effects(model: ir.Model, survey: Survey, dead: Bools, feed: Feed, dense: dict[str, Array]) -> None:
    """Masking any block alone changes an output."""
    for block in survey.blocks:
        if dead[block.ids].any():
            alone = np.zeros_like(dead)
            alone[block.ids] = dead[block.ids]
            effect = distance(run(masked(model, survey, alone), feed), dense)
            assert effect > EFFECT, f"masking {block.name} changes nothing"


def survey_of(model: ir.Model, feed: Feed, *, interface: bool = False) -> Survey:
    """Observe and trace."""
    return trace(model, observe(model, feed), interface=interface)


def killed(survey: Survey, ratio: float, kinds: Sequence[Kind] | None = None, seed: int = 0) -> Bools:
    """A random share of the units of every block, at least one and never all."""
    rng = np.random.default_rng(seed)
    dead = np.zeros(survey.ids, dtype=bool)
    for block in survey.blocks:
        if kinds is None or block.kind in kinds:
            count = min(block.units - 1, max(1, round(ratio * block.units)))
            dead[block.ids[rng.permutation(block.units)[:count]]] = True
    return dead


def narrowed(model: ir.Model, survey: Survey, dead: Bools) -> ir.Model:
    """A copy without the dead units."""
    slim = model.clone()
    apply(slim.graph, survey, Ledger(dead=dead, arrays={}))
    return slim


def session(model: ir.Model | bytes) -> ort.InferenceSession:
    """Without optimisations, so that both models run the same kernels."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if isinstance(model, ir.Model):
        proto = ir.to_proto(model)
        widen(proto)  # there are no kernels for bfloat16
        model = proto.SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(model: ort.InferenceSession | ir.Model | bytes, feed: Feed) -> dict[str, Array]:
    """Outputs by name; recorded shapes stay in the file, so stale ones are met."""
    handle = model if isinstance(model, ort.InferenceSession) else session(model)
    return dict(zip([o.name for o in handle.get_outputs()], handle.run(None, dict(feed)), strict=True))


def takes(handle: ort.InferenceSession, feed: Feed) -> bool:
    """Return True if a model takes this feed."""
    try:
        run(handle, feed)
    except Exception:  # noqa: BLE001  the runtime's exceptions share no base
        return False
    return True


def short(feed: Feed) -> dict[str, Array] | None:
    """The feed without its last sample."""
    batches = {a.shape[0] for a in feed.values() if a.ndim}
    if len(batches) != 1 or batches <= {1}:
        return None
    return {n: a[:-1] if a.ndim else a for n, a in feed.items()}


def check_same(got: dict[str, Array], want: dict[str, Array]) -> None:
    """Same names, shapes and values."""
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].shape == array.shape, name
        assert got[name].dtype == array.dtype, name
    assert distance(got, want) <= TOLERANCE


def distance(a: dict[str, Array], b: dict[str, Array]) -> float:
    """Largest difference of any output, relative to its largest value."""
    worst = 0.0
    for name, right in b.items():
        x, y = a[name].astype(np.float64), right.astype(np.float64)
        assert np.isfinite(y).all(), name
        worst = max(worst, float(np.abs(x - y).max(initial=0.0) / max(np.abs(y).max(initial=0.0), 1e-6)))
    return worst


def check_recorded(model: ir.Model, feed: Feed) -> None:
    """Sizes that the file records for its tensors are the sizes they have."""
    made = [v for node in model.graph for v in node.outputs if v.name and v.shape is not None]
    recorded = {v.name: v.shape for v in made if v.dtype not in (ir.DataType.INT4, ir.DataType.UINT4)}
    real = run(to_bytes(model, outputs=list(recorded)), feed)
    for name, shape in recorded.items():
        sizes = [d if isinstance(d, int) else None for d in shape.dims]
        assert len(sizes) == real[name].ndim, name
        assert all(s in {None, r} for s, r in zip(sizes, real[name].shape, strict=True)), (
            name,
            shape,
            real[name].shape,
        )
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        assert value.shape is not None
        assert tuple(value.shape) == tuple(value.const_value.shape), value.name


def passes_checker(model: bytes) -> bool:
    """Return True if the ONNX checker knows all ops and shapes of the original."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception:  # noqa: BLE001  C++ exceptions of several types
        return False
    return True


def size(model: ir.Model) -> int:
    """Elements in all weights, those of one byte or less included."""
    tensors = [v.const_value for v in model.graph.initializers.values()]
    return sum(t.size for t in tensors if t is not None and (t.dtype.is_floating_point() or t.dtype.bitwidth <= 8))


def check_stored(model: ir.Model, slim: ir.Model) -> None:
    """Weights kept as integers still are: under as many nodes as before, none of them with wider numbers."""
    before, after = (Counter(n.op_type for n in m.graph) for m in (model, slim))
    assert all(after[op] >= before[op] for op in ("DequantizeLinear", "MatMulNBits"))
    looked_up = [sum(lookups_of(node) is not None for node in m.graph) for m in (model, slim)]
    assert looked_up[1] >= looked_up[0]
    for value in slim.graph.initializers.values():
        old = model.graph.initializers.get(value.name.split("/narrowed")[0])
        assert old is None or old.dtype == value.dtype, value.name
