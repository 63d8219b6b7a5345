"""The inputs that a feed must provide, and checks of arrays against them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.feeds.parts import Rows
from onnxgrail.calibration.shapes.ids import table_rows
from onnxgrail.core import Array, Feed
from onnxgrail.errors import DataError, ModelError
from onnxgrail.graph.rewrite.rows import TOKENS
from onnxgrail.graph.slots import is_float

WHOLE = "onnxgrail.whole"  # key in a model's `meta`, see `Input.whole`
MASKS = ("attention_mask", "input_mask", "mask")  # inputs that say which tokens are real
ANSWERS = ("label", "target", "targets", "y")  # what users call labels
UNNAMED = frozenset({"None", "unknown"})  # what some exporters call all open axes


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A graph input that a feed must provide.

    Attributes:
        name: its name in the graph.
        dtype: numpy dtype (a dtype of `ml_dtypes` for bfloat16 and smaller floats, object for strings).
        shape: per axis a number, the name of a symbolic dimension, or None; None as a whole if no rank is declared.
        rows: number of rows of the smallest constant table that is indexed by the input's values; None if there is
            none.
        kept: the ids that it may hold, ascending, if rows of tables are gone; empty if all are there.
        whole: no axis counts samples in any input, although sizes are open: a feed is one sample, such as a waveform.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...] | None
    rows: int | None = None
    kept: tuple[int, ...] = ()
    whole: bool = False

    def __str__(self) -> str:
        """Return `name dtype[batch, 3, 224, 224]`, for messages."""
        dims = "..." if self.shape is None else ", ".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name} {'string' if self.dtype == object else self.dtype}[{dims}]"


Signature = tuple[Input, ...]


def takes_vectors(shapes: Iterable[Sequence[Any] | None]) -> bool:
    """Return True if no axis of a model's inputs counts samples: they are numbers and vectors of fixed sizes."""
    known = [(None,) * 2 if shape is None else tuple(shape) for shape in shapes]
    sizes = [shape[0] for shape in known if shape]
    fixed = all(len(shape) < 2 for shape in known) and all(isinstance(size, int) for size in sizes)
    return fixed and max(sizes, default=1) > 1


def is_whole(feed: Mapping[str, Rows], signature: Signature) -> bool:
    """Return True if a feed is one sample although its sizes are open, so that it cannot be cut.

    An input can be a matrix of nodes by nodes, whose first axis counts the nodes of a graph.  Both axes have the same
    name then, which some exporters give to all open axes: the array has to be square, too.
    """
    if any(entry.whole for entry in signature):
        return True
    named = [e.name for e in signature if e.shape and len(e.shape) == 2 and _same_name(*e.shape)]
    sizes = [feed[name].shape for name in named if name in feed]
    return any(len(shape) == 2 and shape[0] == shape[1] > 1 for shape in sizes)


def stays(feed: Feed, signature: Signature) -> bool:
    """Return True if a feed is not cut to show or to time a single sample: vectors of open sizes may be waveforms."""
    return is_whole(feed, signature) or all(array.ndim < 2 for array in feed.values())


def _same_name(one: int | str | None, other: int | str | None) -> bool:
    return one == other and isinstance(one, str) and one.isidentifier() and one not in UNNAMED


def samples_of(feed: Mapping[str, Rows], signature: Signature) -> int:
    """Return the number of samples in a feed: the common first axis, 1 if there is none."""
    if takes_vectors(entry.shape for entry in signature) or is_whole(feed, signature):
        return 1
    sizes = {array.shape[0] for array in feed.values() if array.ndim}
    return sizes.pop() if len(sizes) == 1 else 1


def signature_of(model: ir.Model) -> Signature:
    """Return the inputs a feed must provide, in graph order, without inputs that have a default value (initializers).

    Raises:
        ModelError: an input is not a tensor.
    """
    found = []
    for value in model.graph.inputs:
        if value.name is None or value.name in model.graph.initializers:
            continue
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            raise ModelError(f"input {value.name!r} is a {type(value.type).__name__}, expected a tensor")
        if value.dtype in (None, ir.DataType.UNDEFINED):
            raise ModelError(f"input {value.name!r} declares no element type")
        dtype = np.dtype(object) if value.dtype == ir.DataType.STRING else value.dtype.numpy()
        shape = None if value.shape is None else _dims(value.shape)
        rows = table_rows(model, value.name, exact=True) if dtype.kind in "iu" else None
        kept = model.meta.get(TOKENS, {}).get(value.name, ())
        whole = model.meta.get(WHOLE, False)
        found.append(Input(name=value.name, dtype=dtype, shape=shape, rows=rows, kept=kept, whole=whole))
    return tuple(found)


def _dims(shape: ir.Shape) -> tuple[int | str | None, ...]:
    # Some exporters write a negative size for an open dimension, and ONNX Runtime accepts that.
    return tuple((dim if dim >= 0 else None) if isinstance(dim, int) else dim.value for dim in shape)


def free_sizes(signature: Signature, feeds: Iterable[Feed]) -> dict[str, int]:
    """Return the sizes of named dimensions that have the same size in all inputs and feeds."""
    found: dict[str, set[int]] = {}
    for feed in feeds:
        for entry in signature:
            for dim, size in zip(entry.shape or (), np.shape(feed[entry.name]), strict=False):
                if isinstance(dim, str):
                    found.setdefault(dim, set()).add(size)
    return {name: sizes.pop() for name, sizes in found.items() if len(sizes) == 1}


def describe(signature: Signature) -> str:
    """Return the whole signature on one line."""
    return "; ".join(str(entry) for entry in signature) or "no inputs"


def check_names(names: set[str], signature: Signature, source: str, others: Mapping[str, Any] | None = None) -> None:
    """Check that exactly the model's inputs are given; `others` are arrays of unknown names, for the message.

    Raises:
        DataError: an input is missing, or a name is not an input.
    """
    wanted = [entry.name for entry in signature]
    missing, extra = [n for n in wanted if n not in names], sorted(names - set(wanted))
    hint = f"The model takes: {describe(signature)}"
    if missing:
        also = f", has {', '.join(_shown(name, (others or {}).get(name)) for name in extra)}" if extra else ""
        raise DataError(f"{source}: no array for input {', '.join(map(repr, missing))}{also}", hint=hint)
    if extra:
        answers = next((name for name in extra if name.lower() in ANSWERS), None)
        hint += "" if answers is None else f". If {answers!r} holds the right answers, call it 'labels'"
        raise DataError(f"{source}: the model has no input named {', '.join(map(repr, extra))}", hint=hint)


def _shown(name: str, array: Any) -> str:
    return repr(name) if array is None else f"{name!r} {array.dtype}{list(array.shape)}"


def check_array(array: Any, entry: Input, source: str, *, batch_axis: bool) -> tuple[str, ...]:
    """Check that an array fits an input; return notes about a dtype that will be converted without loss.

    Args:
        array: (n, ...) samples, or exactly the model's input.
        entry: the input.
        source: name of the data in messages.
        batch_axis: True if the first axis counts samples, so that its length may differ from the declared length.

    Raises:
        DataError: dtype, rank or a fixed dimension differs, or the array is empty.
    """
    where = f"{source}, input {entry.name!r}"
    note = _convertible(array.dtype, entry, where)
    if entry.shape is not None:
        if array.ndim != len(entry.shape):
            raise DataError(
                f"{where}: got rank {array.ndim} (shape {list(array.shape)}), expected rank {len(entry.shape)}",
                hint=f"The model takes: {entry}{_turned(array.shape, entry.shape)}",
            )
        for axis, (got, declared) in enumerate(zip(array.shape, entry.shape, strict=True)):
            if isinstance(declared, int) and got != declared and not (axis == 0 and batch_axis):
                raise DataError(
                    f"{where}: got {got} at axis {axis} (shape {list(array.shape)}), expected {declared}",
                    hint=f"The model takes: {entry}{_turned(array.shape, entry.shape)}",
                )
    declared_empty = entry.shape is not None and 0 in entry.shape
    if array.size == 0 and (array.ndim == 0 or array.shape[0] == 0) and not declared_empty:
        raise DataError(f"{where}: no samples (shape {list(array.shape)})", hint="Give at least one sample")
    return note


def _turned(shape: tuple[int, ...], declared: Sequence[int | str | None]) -> str:
    """Return what would make an array of samples fit: another order of the axes, or a first one; empty for neither."""
    if len(shape) and agrees(shape, declared[1:]):
        return "; one sample is array[None]"
    for axes in ((0, 3, 1, 2), (0, 2, 3, 1), (0, 2, 1)):
        if len(axes) == len(shape) and agrees([shape[a] for a in axes[1:]], declared[1:]):
            return f"; the axes seem to be in another order: array.transpose{axes} would fit"
    return ""


def agrees(shape: Sequence[int], declared: Sequence[int | str | None]) -> bool:
    """Return True if a shape has the rank and the fixed sizes of a declared one."""
    pairs = zip(shape, declared, strict=False)
    return len(shape) == len(declared) and all(not isinstance(dim, int) or dim == size for size, dim in pairs)


def converts(got: np.dtype[Any], want: np.dtype[Any]) -> bool:
    """Return True if one dtype may be converted to the other: without loss, or between integers.

    `check_integers` checks the values of integers later.  Lossy conversions of floats are left to the user.
    """
    if got == want or (want.kind == "O" and got.kind in "OUS") or (got.kind in "iu" and want.kind in "iu"):
        return True
    return is_float(got) and is_float(want) and np.can_cast(got, want, "safe")


def _convertible(got: np.dtype[Any], entry: Input, where: str) -> tuple[str, ...]:
    want = entry.dtype
    if got == want or (want.kind == "O" and got.kind in "OUS"):
        return ()
    if converts(got, want):
        return (f"input {entry.name!r}: converted from {got} to {want}",)
    scaled = " and scale it as for training, such as by 1 / 255" if got == np.uint8 and is_float(want) else ""
    hint = f"Convert it with .astype({str(want)!r}){scaled}; the model takes: {entry}"
    raise DataError(f"{where}: got {got}, expected {want}", hint=hint)


def convert(array: Array, entry: Input) -> Array:
    """Convert an array that passed `check_array` to the input's dtype, contiguous; no value changes."""
    return np.ascontiguousarray(array, dtype=entry.dtype).reshape(array.shape)


def count_bad(array: Array, entry: Input) -> int:
    """Count values that are NaN or infinite; minus infinity is allowed in inputs named as masks (additive masks)."""
    if not is_float(array.dtype):
        return 0
    good = np.isfinite(array)
    if "mask" in entry.name.lower():
        good |= np.isneginf(array)
    return int(good.size - np.count_nonzero(good))


def check_integers(array: Array, entry: Input, source: str) -> None:
    """Check that integers fit the input's dtype and the table that they index.

    Raises:
        DataError: a value is out of range, or an id whose row is gone.
    """
    if array.dtype.kind not in "iu" or entry.dtype.kind not in "iu" or not array.size:
        return
    low, high, limits = int(array.min()), int(array.max()), np.iinfo(entry.dtype)
    where = f"{source}, input {entry.name!r}"
    if low < limits.min or high > limits.max:
        raise DataError(f"{where}: values from {low} to {high} do not fit {entry.dtype}", hint=f"It takes: {entry}")
    if entry.rows is not None and low < 0:
        raise DataError(
            f"{where}: ids down to {low}, which would read the table from its end",
            hint="Padded positions need the tokenizer's id of padding; -1 and -100 are for labels",
        )
    if entry.rows is not None and high >= entry.rows:
        raise DataError(
            f"{where}: ids up to {high}, the model's table has {entry.rows} rows",
            hint="Take the tokenizer and the data that belong to this model",
        )
    lost = array[~np.isin(array, entry.kept)] if entry.kept else array.ravel()[:0]
    if lost.size:
        hint = "Add the ids of all data to the file, or leave out the samples that hold others"
        raise DataError(f"{where}: id {lost[0]} occurs, and --keep-tokens leaves it out", hint=hint)


def check_shown(shown: bool, entry: Input, source: str) -> None:
    """Check that a mask of tokens leaves something to look at.

    Args:
        shown: a value is not 0.
        entry: the input.
        source: name of the data in messages.

    Raises:
        DataError: the mask hides every token, so that any two models would agree.
    """
    if not shown and entry.name in MASKS and entry.dtype.kind in "iub" and len(entry.shape or ()) == 2:
        raise DataError(f"{source}, input {entry.name!r}: 0 everywhere", hint="1 is a token, 0 is padding")


def bad_values(bad: int, size: int, entry: Input, source: str) -> DataError:
    """Return the error for data that hold NaN or infinity."""
    return DataError(
        f"{source}, input {entry.name!r}: {bad} of {size} values are NaN or infinite", hint="Remove those samples"
    )


def padding_mask(feed: Mapping[str, Array]) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Return the mask of real tokens from a (B, S) integer or boolean attention-mask input of the feed.

    Returns:
        (B, S) booleans, or None if no input is such a mask or nothing is padded.
    """
    for name in MASKS:
        array = feed.get(name)
        if array is not None and array.ndim == 2 and array.dtype.kind in "iub":
            mask = array != 0
            return None if mask.all() else mask
    return None
