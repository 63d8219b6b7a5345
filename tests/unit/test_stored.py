"""Weights kept as integers: they decode to what ONNX Runtime computes, and cutting commutes with decoding."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxgrail.core import Array, Bools
from onnxgrail.graph.cuts.segment import cut
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.stored.find import below_a_byte
from onnxgrail.graph.stored.integers import Levels, Stored
from onnxgrail.graph.stored.looked_up import PLACES, TARGET, LookedUp
from onnxgrail.graph.stored.packed import BITS, Packed, packed_bits, unpacked
from onnxgrail.graph.stored.scaled import Scaled, limits
from onnxgrail.graph.stored.turned import turned
from tests.contract.cases_lookups import MATRICES
from tests.contract.cases_quantised import BLOCKS, FOLDED, KINDS, PACKED
from tests.contract.rule_case import Case, build
from tests.oracle import run, survey_of
from tests.tiny import feed, scalar, tiny

CASES = [*KINDS, *FOLDED[:-1], *BLOCKS, *MATRICES, *(c for c in PACKED if "reordered" not in c.note)]
Load = Callable[[str], Array]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def model(case: Case) -> ir.Model:
    return build(case)


@pytest.fixture
def stored(model: ir.Model) -> Stored:
    return of_model(model)


@pytest.fixture
def load(model: ir.Model) -> Load:
    return lambda name: model.graph.initializers[name].const_value.numpy()


def of_model(model: ir.Model) -> Stored:
    (found,) = survey_of(model, feed(model)).facts.stored.values()
    return found


def halves(stored: Stored, seed: int = 0) -> dict[int, Bools]:
    """A choice of positions along both axes, by whole blocks."""
    rng = np.random.default_rng(seed)
    keep = {}
    for axis, size in enumerate(stored.shape):
        blocks = -(-size // stored.block(axis))
        keep[axis] = np.repeat(rng.permutation(blocks) % 2 == 0, stored.block(axis))[:size]
    return keep


def taken(array: Array, keep: dict[int, Bools]) -> Array:
    for axis, mask in keep.items():
        array = array.compress(mask, axis)
    return array


def of_parts(stored: Stored, parts: dict[int, Array]) -> tuple[Stored, Load]:
    """The stored weight that parts make, and how they are found."""
    if isinstance(stored, Packed):
        shape = (parts[1].shape[0], min(parts[1].shape[1] * stored.size, stored.shape[1]))
        made: Stored = Packed(
            shape, stored.dtype, "1", "2", "3" if 3 in parts else "", stored.bits, stored.size, stored.flat
        )
    elif isinstance(stored, LookedUp):
        shape = tuple(parts[TARGET].tolist())
        made = LookedUp(shape, stored.dtype, "0", "1", "2" if PLACES in parts else "", parts[1].shape[1], "")
    else:
        assert isinstance(stored, Scaled)
        zero = "2" if 2 in parts else ""
        made = Scaled(
            parts[0].shape, stored.dtype, "0", "1", zero, stored.axis, stored.size, stored.per_axis, "", stored.bits
        )
    return made, lambda name: parts[int(name)]


def test_it_decodes_to_what_the_runtime_computes(case: Case, model: ir.Model, stored: Stored, load: Load) -> None:
    if case.op in ("DequantizeLinear", "Mul", "Reshape"):
        want = run(to_bytes(model, outputs=["v"]), feed(model))["v"]
    else:
        piece = cut(model, ["k"], ["z"], survey_of(model, feed(model)).facts)
        nothing, everything = (run(piece, {"k": k}) for k in (np.zeros((40, 40), "f"), np.eye(40, dtype="f")))
        want = (everything["z"] - nothing["z"]).T  # without the bias
    got = stored.decode(load)
    assert (got.shape, got.dtype) == (stored.shape, want.dtype)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_cut_then_decoded_is_decoded_then_cut(stored: Stored, load: Load) -> None:
    keep = halves(stored)
    assert not all(mask.all() for mask in keep.values())
    made, get = of_parts(stored, stored.cut(load, keep, None))
    got, want = made.decode(get), taken(stored.decode(load), keep)
    if isinstance(stored, Packed):  # a last block that is half full may have gone or stayed
        assert not got[:, want.shape[1] :].any() or keep[1][-1]
        got = got[:, : want.shape[1]]
    np.testing.assert_array_equal(got, want)


def test_bytes_are_counted_with_scales_and_zero_points(stored: Stored, load: Load) -> None:
    keep = halves(stored)
    parts = stored.cut(load, keep, None)
    first, *beside = (parts[number] for number in sorted(parts) if number < TARGET or isinstance(stored, Packed))
    left = [int(keep[axis].sum()) for axis in (0, 1)]
    if first.dtype.itemsize * 8 == stored.bits or isinstance(stored, Packed | LookedUp):
        assert stored.nbytes(left) == first.nbytes + sum(part.nbytes for part in beside)


def test_old_values_change_nothing(stored: Stored, load: Load) -> None:
    keep = halves(stored)
    plain, again = stored.cut(load, keep, None), stored.cut(load, keep, stored.decode(load))
    assert plain.keys() == again.keys()
    for number, part in plain.items():
        if isinstance(stored, Packed) and number == 1:  # bits after the last number are nobody's
            continue
        np.testing.assert_array_equal(again[number], part)
        assert again[number].dtype == part.dtype


def test_new_values_are_met_to_half_a_step(stored: Stored, load: Load) -> None:
    keep = halves(stored)
    new = (stored.decode(load) * 0.9).astype(stored.dtype)
    first = tuple(int(np.argmax(keep[axis])) for axis in (0, 1))
    new[first] = 5 * np.abs(new).max()  # out of the range of its scale
    plain, parts = stored.cut(load, keep, None), stored.cut(load, keep, new)
    number = 2 if isinstance(stored, Packed) else 1
    grew = parts[number] > plain[number]
    assert grew.sum() == 1
    np.testing.assert_array_equal(parts[number][~grew], plain[number][~grew])
    made, get = of_parts(stored, parts)
    got, want = made.decode(get), taken(new, keep)
    gap = np.abs(got[:, : want.shape[1]] - want)
    assert (gap <= 0.501 * steps(stored, parts)[:, : want.shape[1]] + 1e-7).all()
    assert gap[0, 0] < 1e-3 * want[0, 0]  # the code at the end of the range


def test_numbers_on_the_levels_are_stored_exactly(stored: Stored, load: Load) -> None:
    new = (stored.decode(load) * np.random.default_rng(0).uniform(0.5, 1.2, stored.shape)).astype(stored.dtype)
    levels = stored.levels(load, stored.cut(load, {}, new))
    parts = [np.broadcast_to(part, stored.shape) for part in levels]
    found = Levels(*parts).nearest(new)
    made, get = of_parts(stored, stored.cut(load, {}, found.astype(stored.dtype)))
    np.testing.assert_allclose(made.decode(get)[:, : stored.shape[1]], found, rtol=1e-5, atol=1e-7)
    room = 0.501 * parts[0] + 1e-7
    assert (np.abs(found - new) <= room).mean() > 0.95  # a number at the end of the range may lie half a step outside


def steps(stored: Stored, parts: dict[int, Array]) -> Array:
    """The scale of every number."""
    number, found = (1 if isinstance(stored, Packed) else 0), []
    for code in (0, 1):
        codes = np.full_like(parts[number], code)
        if isinstance(stored, Packed):
            codes = packed_bits(np.full((*codes.shape[:-1], stored.size), code), stored.bits)
        if isinstance(stored, LookedUp):
            codes = codes * 17
        made, get = of_parts(stored, {**parts, number: codes})
        found.append(made.decode(get))
    return found[1] - found[0]


def test_zeros_in_a_block_of_its_own_are_exact() -> None:
    """No code means 0 if the zero point is a fraction."""
    case = next(c for c in PACKED if c.note == "fractions")
    model = build(case)
    stored, arrays = of_model(model), {v.name: v.const_value.numpy() for v in model.graph.initializers.values()}
    values = stored.decode(arrays.__getitem__)
    values[:, 16:32] = 0
    parts = stored.cut(arrays.__getitem__, {}, values)
    made, get = of_parts(stored, parts)
    np.testing.assert_allclose(made.decode(get)[:, :40], values, atol=1e-5)
    assert not made.decode(get)[:, 16:32].any()


@pytest.fixture
def simple() -> tuple[Scaled, Callable[[Array, Array], Load]]:
    stored = Scaled((2, 3), np.dtype(np.float32), "q", "s", "", 0, 0, True, "q")
    return stored, lambda q, s: {"q": q, "s": s}.__getitem__


def test_a_bit_that_was_left_free_stays_free(simple: tuple[Scaled, Callable[[Array, Array], Load]]) -> None:
    stored, found = simple
    q = np.int8([[64, -3, 5], [-7, 2, -64]])
    parts = stored.cut(found(q, np.float32([1, 1])), {}, np.float32([[100, 1, 1], [1, 1, 1]]))
    np.testing.assert_array_equal(parts[0], [[64, 1, 1], [1, 1, 1]])
    np.testing.assert_allclose(parts[1], [100 / 64, 1])


def test_a_channel_of_zeros_can_be_filled(simple: tuple[Scaled, Callable[[Array, Array], Load]]) -> None:
    stored, found = simple
    q = np.int8([[0, 0, 0], [127, 2, -64]])
    parts = stored.cut(found(q, np.float32([0, 1])), {}, np.float32([[1.27, 0.5, -1], [127, 2, -64]]))
    np.testing.assert_array_equal(parts[0], [[127, 50, -100], [127, 2, -64]])
    np.testing.assert_allclose(parts[1], [0.01, 1])


def test_scales_that_are_negative_stay_so(simple: tuple[Scaled, Callable[[Array, Array], Load]]) -> None:
    stored, found = simple
    parts = stored.cut(
        found(np.int8([[-128, 2, 3], [127, 2, 3]]), np.float32([-1, 1])), {}, np.float32([[256, 2, 3], [1, 2, 3]])
    )
    np.testing.assert_array_equal(parts[0], [[-128, -1, -2], [1, 2, 3]])
    np.testing.assert_allclose(parts[1], [-2, 1])


def test_narrow_floats_are_clamped_not_lost() -> None:
    kind = ml_dtypes.float8_e4m3fn
    arrays = {"q": np.array([[1.0, 448.0]]).astype(kind), "s": np.float32(1)}
    stored = Scaled((1, 2), np.dtype(np.float32), "q", "s", "", 0, 0, False, "q")
    parts = stored.cut(arrays.__getitem__, {}, np.float32([[896, 1]]))
    assert parts[0].dtype == kind
    np.testing.assert_array_equal(parts[0].astype(np.float32) * parts[1], [[896, 1]])


@pytest.mark.parametrize(
    ("kind", "want"),
    [(np.int8, (-128, 127)), (ml_dtypes.int4, (-8, 7)), (ml_dtypes.uint4, (0, 15)), (np.uint16, (0, 65535))],
)
def test_limits(kind: type, want: tuple[int, int]) -> None:
    assert limits(np.dtype(kind)) == want


@given(bits=st.sampled_from(BITS), rows=st.integers(1, 3), width=st.integers(1, 19), seed=st.integers(0, 2**32 - 1))
def test_packing_is_undone(bits: int, rows: int, width: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 2**bits, (rows, width))
    data = packed_bits(numbers, bits)
    assert (data.dtype, data.shape) == (np.uint8, (rows, -(-width * bits // 8)))
    np.testing.assert_array_equal(unpacked(data, bits)[:, :width], numbers)
    assert not unpacked(data, bits)[:, width:].any()


@given(bits=st.sampled_from(BITS), data=st.binary(max_size=9))
def test_unpacking_is_undone(bits: int, data: bytes) -> None:
    array = np.frombuffer(data, np.uint8)
    np.testing.assert_array_equal(packed_bits(unpacked(array, bits), bits), array)


def test_a_transposed_weight_is_seen_turned() -> None:
    stored = turned(Scaled((2, 6), np.dtype(np.float32), "q", "s", "", 1, 3, False, "q", 4), (1, 0))
    assert (stored.shape, stored.bits, stored.held) == ((6, 2), 4, True)
    assert [stored.block(axis) for axis in (0, 1)] == [3, 1]
    (member,) = stored.members(0, np.array([0, 1, 2]))
    assert (member.name, member.axis, member.positions.tolist()) == ("q", 1, [0, 1, 2])


def test_numbers_below_a_byte_are_known_where_nothing_is_recorded() -> None:
    body = "a = QuantizeLinear<output_dtype=22>(f, s)\nb = Transpose(a)\nv = DequantizeLinear(b, s)\ny = MatMul(x, v)"
    model = tiny("float[N,6] x => float[] y", body, {"f": (8, 6), "s": scalar(0.1)}, opset=21, recorded=False)
    assert below_a_byte(model) == {"a", "b"}
