"""Calibration data with something wrong about them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxgrail.core import Array
from tests.mutation import wire
from tests.mutation.protos import NAMES, pick

Rng = np.random.Generator
Arrays = Mapping[str, Array]
SHAPES = ("(8, 6)", "(9999999999999, 6)", "(-1, 6)", "()", "(8, 6", "(8.5,)", "(True,)", "(0, 6)", "('a',)",
          "(" + "1," * 5000 + ")", "[8, 6]", "(2**40,)", "None")  # fmt: skip
DTYPES = ("<f4", "|O", "<f8", ">f4", "<U9999999", "|V100", "<M8[s]", "no", "[('a', '<f4')]", "<f4" * 100, "|S0", "<c8")


def broken(arrays: Arrays, folder: Path, rng: Rng) -> str:
    """Write data for a model; returns the name to give to `--data`."""
    make = pick((as_bytes, other_arrays, other_header, odd_archive, folders), rng)
    name: str = make(arrays, folder, rng)
    return name


def as_bytes(arrays: Arrays, folder: Path, rng: Rng) -> str:
    """A good file with broken bytes."""
    stream = io.BytesIO()
    single = rng.random() < 0.3
    if single:
        np.save(stream, next(iter(arrays.values())))
    else:
        pick((np.savez, np.savez_compressed), rng)(stream, **arrays)
    name = "broken.npy" if single else "broken.npz"
    change = pick((wire.flipped, wire.overwritten, wire.truncated, wire.cut_out, wire.repeated), rng)
    (folder / name).write_bytes(change(stream.getvalue(), rng))
    return name


def other_arrays(arrays: Arrays, folder: Path, rng: Rng) -> str:
    """Good files with arrays that do not fit."""
    name = pick(arrays, rng)
    array = np.array(arrays[name])
    bad = array.copy()
    bad[0] = pick((np.nan, np.inf, -np.inf, 1e38, 0), rng)
    changed = {
        "dtype": array.astype(pick((np.int64, np.float64, np.float16, np.complex64, np.bool_, "U5", "S3"), rng)),
        "objects": np.array([{}] * len(array), dtype=object),
        "records": np.zeros(4, dtype=[("a", "<f4")]),
        "bad": bad,
        "none": array[:0],
        "flat": array.reshape(-1),
        "scalar": np.array(1.0, np.float32),
        "deep": array.reshape(array.shape + (1,) * 20),
        "wide": np.broadcast_to(np.float32(0), (1, *[0] * 3)),
        "one": array[:1],
        "dates": np.zeros(3, "datetime64[s]"),
    }
    held = dict(arrays)
    action = rng.random()
    if action < 0.8:
        held[name] = pick(changed.values(), rng)
    elif action < 0.9:
        held.pop(name)
    else:
        held["labels" if rng.random() < 0.5 else "other"] = array
    np.savez(folder / "broken.npz", **held)
    return "broken.npz"


def other_header(arrays: Arrays, folder: Path, rng: Rng) -> str:
    """An array file whose head promises something else."""
    parts = (f"'descr': '{pick(DTYPES, rng)}'", f"'fortran_order': {pick((True, False, 3), rng)}")
    text = "{" + ", ".join([*parts, f"'shape': {pick(SHAPES, rng)}"]) + ", }"
    if rng.random() < 0.2:
        text = pick(("", "{}", "[" * 3000, "{'descr': __import__('os')}", "x" * 100_000, "{'a': 1}"), rng)
    version = pick((1, 2, 3, 9), rng)
    length = pick((len(text), 0, 65_535, 10), rng)
    size = 2 if version == 1 else 4
    head = b"\x93NUMPY" + bytes([version, 0]) + min(length, 256**size - 1).to_bytes(size, "little")
    body = head + text.encode() + bytes(64)
    if rng.random() < 0.5:
        (folder / "broken.npy").write_bytes(body)
        return "broken.npy"
    with zipfile.ZipFile(folder / "broken.npz", "w") as archive:
        archive.writestr(f"{next(iter(arrays))}.npy", body)
    return "broken.npz"


def odd_archive(arrays: Arrays, folder: Path, rng: Rng) -> str:
    """An archive with strange members: names that climb, no array at all, the same name twice."""
    name = next(iter(arrays))
    stream = io.BytesIO()
    np.save(stream, arrays[name])
    action = rng.random()
    with zipfile.ZipFile(folder / "broken.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        if action < 0.2:
            archive.writestr("../../up.npy", stream.getvalue())
        elif action < 0.5:
            archive.writestr(name, b"no array")
        elif action < 0.7:
            archive.writestr(f"{name}.npy", b"\x80\x04K\x01.")  # a pickle
        elif action < 0.8:
            archive.writestr(f"{pick([n for n in NAMES if chr(0) not in n], rng)[:200]}.npy", stream.getvalue())
        else:
            archive.writestr(f"{name}.npy", stream.getvalue())
            archive.writestr(f"{name}", stream.getvalue())
    return "broken.npz"


def folders(arrays: Arrays, folder: Path, rng: Rng) -> str:
    """A folder of data: of tensors as messages, of arrays, of nothing."""
    place = folder / "data"
    place.mkdir()
    action = rng.random()
    for number, (name, array) in enumerate(arrays.items()):
        if action < 0.5:
            tensor = numpy_helper.from_array(array, pick((name, "", "other"), rng))
            if rng.random() < 0.3:
                tensor.dims[0] = pick((-1, 0, 2**40, 7), rng)
            if rng.random() < 0.2:
                tensor.data_location = TensorProto.EXTERNAL
                tensor.external_data.add(key="location", value="../m.onnx")
            change = pick((bytes, wire.flipped, wire.truncated, wire.revalued, wire.dropped), rng)
            data = tensor.SerializeToString()
            (place / f"input_{number}.pb").write_bytes(data if change is bytes else change(data, rng))
        elif action < 0.9:
            np.save(place / f"{pick((name, 'a'), rng)}.npy", array if rng.random() < 0.5 else array[:, :1])
        if action > 0.8:
            (place / "text.npz").write_text("no archive")
    return "data"
