"""Models whose weights lie in files: read where they are, never all in memory, written aligned and whole."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrail
from bench import large_model
from onnxgrail.calibration import observe as observing
from onnxgrail.calibration.observe import observe
from onnxgrail.errors import ModelError
from onnxgrail.finishing import finish
from onnxgrail.graph.io import inside, model_file, shelves
from onnxgrail.graph.io.mapped import LARGE, Mapped
from onnxgrail.machine.files import unchanged
from onnxgrail.machine.files.unchanged import SteadyFile
from tests import tiny
from tests.written import weights_of

SIZES = {"hidden": 64, "heads": 4, "words": 50, "tokens": 8}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small one with external data."""
    path = tmp_path / "home" / "model.onnx"
    path.parent.mkdir()
    large_model.write(path, depth=2, width=32, dtype="fp32", **SIZES)
    return path


def ids(count: int = 4) -> dict[str, np.ndarray]:
    return {"ids": np.random.default_rng(1).integers(0, SIZES["words"], (count, SIZES["tokens"]))}


def weights(path: Path) -> dict[str, bytes]:
    """Bytes of every initializer, read by onnx."""
    return {t.name: onnx.numpy_helper.to_array(t).tobytes() for t in onnx.load(path).graph.initializer}


def outputs(path: Path) -> np.ndarray:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, ids())[0])


# ------------------------------------------------------------------------------------------------------------ reading


def hub(model: Path, folder: Path) -> Path:
    """The layout of a model hub's cache: links in a snapshot to files named by their checksum."""
    snapshot, blobs = folder / "snapshots" / "1a2b", folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (model, model.with_name(f"{model.name}.data")):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot / model.name


def test_links_of_a_hub_cache_are_followed(llama: Path, tmp_path: Path) -> None:
    plain = onnxgrail.compress(llama, tmp_path / "plain.onnx", data=ids(), ratio=0.3)
    before = outputs(llama)
    model = hub(llama, tmp_path / "hub")
    result = onnxgrail.compress(model, tmp_path / "linked.onnx", data=ids(), ratio=0.3)
    assert weights(tmp_path / "linked.onnx") == weights(tmp_path / "plain.onnx")
    assert result.report.data["model"]["bytes_before"] == plain.report.data["model"]["bytes_before"]
    assert result.report.data["model"]["sha256_data_before"] == plain.report.data["model"]["sha256_data_before"]
    np.testing.assert_array_equal(outputs(model), before)
    assert onnxgrail.inspect(model, input_shapes={"ids": (2, 8)}).bytes == plain.report.data["model"]["bytes_before"]


def test_a_hard_link_is_a_file_like_any_other(llama: Path, tmp_path: Path) -> None:
    os.link(llama.with_name("model.onnx.data"), tmp_path / "twin")
    assert onnxgrail.compress(llama, dry_run=True, data=ids(), ratio=0.3).report.data["verification"]["checker"]


def restated(path: Path, **entries: str) -> None:
    """Return the place of the model's first weight."""
    proto = onnx.load(path, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        entry.value = entries.get(entry.key, entry.value)
    path.write_bytes(proto.SerializeToString())


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"location": "../secret"}, "outside the model's folder"),
        ({"location": "sub/../../secret"}, "outside the model's folder"),
        ({"location": "/etc/passwd"}, "outside the model's folder"),
        ({"location": "."}, "missing"),
        ({"location": "pipe"}, "missing"),
        ({"location": "nowhere"}, "missing"),
        ({"offset": "99999999"}, "truncated"),
        ({"length": "4"}, "its shape needs"),
    ],
)
def test_what_a_model_may_not_say(entries: dict[str, str], why: str, llama: Path) -> None:
    (llama.parent.parent / "secret").write_bytes(bytes(10**6))
    os.mkfifo(llama.parent / "pipe")
    restated(llama, **entries)
    with pytest.raises(ModelError, match=why):
        model_file.load(llama)


def test_loading_touches_no_weight(llama: Path) -> None:
    os.truncate(llama.with_name("model.onnx.data"), llama.with_name("model.onnx.data").stat().st_size)
    model = model_file.load(llama)
    stored = [v.const_value for v in model.graph.initializers.values()]
    big = [t for t in stored if isinstance(t, Mapped)]
    assert len(big) == len(stored) - 4
    array = big[0].numpy()
    assert not array.flags.writeable
    with llama.with_name("model.onnx.data").open("r+b") as file:
        file.seek(big[0].offset or 0)
        file.write(np.full(4, 7.0, np.float32).tobytes())
    with pytest.raises(ModelError, match=r"model.onnx.data' changed while it was used \(it was written again\)"):
        big[0].numpy()


def test_a_file_over_two_gigabytes_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "huge.onnx"
    path.touch()
    os.truncate(path, 2**31 + 10)  # takes no room on the disk
    with pytest.raises(ModelError, match=r"2\.0 GiB.*save_as_external_data=True"):
        onnxgrail.inspect(path)


def test_a_model_from_another_reader_keeps_its_data(llama: Path) -> None:
    result = onnxgrail.compress(ir.load(llama), data=ids(), unit_ratio=0.5)
    direct = onnxgrail.compress(llama, data=ids(), unit_ratio=0.5, dry_run=True)
    for name, value in direct.model.graph.initializers.items():
        assert value.const_value.tobytes() == result.model.graph.initializers[name].const_value.tobytes()


@pytest.fixture
def inline(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same model with its weights inside, of which even small ones are left there."""
    path = tmp_path / "inline.onnx"
    onnx.save(onnx.load(llama), path)
    monkeypatch.setattr(inside, "MODEL", 0)
    monkeypatch.setattr(inside, "LARGE", 256)
    return path


def test_weights_inside_a_model_file_are_not_read(inline: Path, llama: Path) -> None:
    model, twin = model_file.load(inline), model_file.load(llama)
    stored = {name: v.const_value for name, v in model.graph.initializers.items()}
    assert sum(isinstance(t, Mapped) for t in stored.values()) > 10
    for name, tensor in stored.items():
        assert tensor.tobytes() == twin.graph.initializers[name].const_value.tobytes()
        assert isinstance(tensor, Mapped) == (tensor.nbytes >= 256)
    assert ir.to_proto(model).graph.node == ir.to_proto(twin).graph.node


def test_a_model_whose_weights_stay_inside_gives_the_same_file(
    inline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = inline.read_bytes()
    left = onnxgrail.compress(inline, tmp_path / "left.onnx", data=ids(), unit_ratio=0.5).report.data
    monkeypatch.setattr(inside, "MODEL", 2**30)
    read = onnxgrail.compress(inline, tmp_path / "read.onnx", data=ids(), unit_ratio=0.5).report.data
    assert weights(tmp_path / "left.onnx") == weights(tmp_path / "read.onnx")
    for key in ("bytes_before", "sha256_before", "sha256_data_before", "params_before", "params_after"):
        assert left["model"][key] == read["model"][key]
    onnx.checker.check_model(tmp_path / "left.onnx", full_check=True)
    assert inline.read_bytes() == before


def test_a_narrowed_model_outlives_the_file_it_was_made_from(inline: Path, tmp_path: Path) -> None:
    result = onnxgrail.compress(inline, tmp_path / "small.onnx", data=ids(), unit_ratio=0.5)
    inline.unlink()
    data = ir.to_proto(result.model).SerializeToString()
    assert {t.name: onnx.numpy_helper.to_array(t).tobytes() for t in onnx.load_from_string(data).graph.initializer} == (
        weights(tmp_path / "small.onnx")
    )


@pytest.mark.parametrize("rows", [1, 10**6])
def test_a_weight_inside_that_is_not_of_its_size(rows: int, inline: Path) -> None:
    """Its neighbours' bytes, or those after the end of the file, are nobody's weights."""
    proto = onnx.load(inline)
    weight = max(proto.graph.initializer, key=lambda t: len(t.raw_data))
    weight.dims[0] = rows
    inline.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=f"weight.*{weight.name}.*its shape needs"):
        model_file.load(inline)


@pytest.mark.parametrize("damage", [lambda d: d[:-20], lambda d: d[: len(d) // 2], lambda d: b"\x0b" + d])
def test_a_damaged_file_with_weights_inside(inline: Path, damage: Callable[[bytes], bytes]) -> None:
    inline.write_bytes(damage(inline.read_bytes()))
    with pytest.raises(ModelError, match="is not an ONNX model, or is truncated"):
        model_file.load(inline)


# ------------------------------------------------------------------------------------------------------------ writing


def test_external_data_are_written_aligned_and_complete(llama: Path, tmp_path: Path) -> None:
    inside, beside = tmp_path / "inside.onnx", tmp_path / "beside.onnx"
    onnxgrail.compress(llama, inside, data=ids(), unit_ratio=0.5, save_as_external_data=False)
    report = onnxgrail.compress(llama, beside, data=ids(), unit_ratio=0.5).report.data
    tensors = onnx.load(beside, load_external_data=False).graph.initializer
    places = [{e.key: e.value for e in t.external_data} for t in tensors if t.external_data]
    assert len(places) > 10
    assert all(int(p["offset"]) % 64 == 0 and p["location"] == places[0]["location"] for p in places)
    data = weights_of(beside)
    assert max(int(p["offset"]) + int(p["length"]) for p in places) == data.stat().st_size
    assert weights(inside) == weights(beside)
    np.testing.assert_array_equal(outputs(inside), outputs(beside))
    onnx.checker.check_model(inside, full_check=True)
    onnx.checker.check_model(beside, full_check=True)
    after = {data.name: hashlib.sha256(data.read_bytes()).hexdigest()}
    assert report["model"]["sha256_data_after"] == after
    assert report["model"]["bytes_after"] == beside.stat().st_size + data.stat().st_size
    assert {p.name for p in tmp_path.iterdir()} == {"home", "inside.onnx", "beside.onnx", data.name}


def test_ratio_zero_copies_every_weight(llama: Path, tmp_path: Path) -> None:
    for external in (False, True):
        target = tmp_path / f"{external}.onnx"
        onnxgrail.compress(llama, target, unit_ratio=0, data=ids(), save_as_external_data=external)
        assert weights(target) == weights(llama)
        np.testing.assert_array_equal(outputs(target), outputs(llama))


def test_inline_and_external_sources_give_the_same_numbers(llama: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.onnx"
    onnx.save(onnx.load(llama), whole)
    onnxgrail.compress(whole, tmp_path / "a.onnx", data=ids(), unit_ratio=0.5)
    onnxgrail.compress(llama, tmp_path / "b.onnx", data=ids(), unit_ratio=0.5)
    assert weights(tmp_path / "a.onnx") == weights(tmp_path / "b.onnx")


def test_constants_computed_from_large_weights_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"a": (16, 6), "b": (16,), "c": (4, 16)}
    body = "at = Transpose(a)\nh = MatMul(x, at)\ni = Add(h, b)\nr = Relu(i)\nct = Transpose(c)\ny = MatMul(r, ct)"
    path = tmp_path / "m.onnx"
    proto = ir.to_proto(tiny.tiny("float[N,6] x => float[N,4] y", body, shapes))
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    made = []
    for limit in (observing.HEAVY, 0):
        monkeypatch.setattr(observing, "HEAVY", limit)
        model = model_file.load(path)
        values = observe(model, {"x": np.ones((2, 6), np.float32)}).values
        assert isinstance(values, observing.Values) == (limit == 0)
        np.testing.assert_array_equal(values["at"], model.graph.initializers["a"].const_value.numpy().T)
        data = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
        result = onnxgrail.compress(path, tmp_path / f"{limit}.onnx", data=data, unit_ratio=0.5)
        made.append(weights(tmp_path / f"{limit}.onnx"))
        assert [b["kept"] for b in result.report.data["blocks"]] == [8]
    assert made[0] == made[1]


# ------------------------------------------------------------------------------------------------------------- memory

SCRATCH = "onnxgrail-*"


def test_memory_stays_far_below_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 MB of weights: what is not of one block may not be in memory, nor in temporary files afterwards."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sizes = {"width": 512, "hidden": 1024, "heads": 8, "words": 4000, "tokens": 8}
    path, small = tmp_path / "large.onnx", tmp_path / "small.onnx"
    large_model.write(path, depth=17, dtype="fp32", **sizes)
    data = path.with_name("large.onnx.data").stat().st_size
    assert data > 180e6
    assert sizes["width"] * sizes["hidden"] * 4 > LARGE
    choices: dict[str, Any] = {
        "ratio": 0.3,
        "blocks": ["mlp"],
        "compensate": "grail",
        "allocate": "uniform",  # as it is by default from 512 MiB on: trials of blocks take memory of their own
        "cache_budget": "64M",
        "save_as_external_data": True,
    }
    words = json.dumps([str(path), str(small), np.zeros((4, 8), int).tolist(), choices])
    found, peak = large_model.watched(large_model.RUN, words)
    start = subprocess.run(
        [sys.executable, "-c", "import onnxgrail.commands.compress as p; p; print(open('/proc/self/status').read())"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    base = next(int(line.split()[1]) * 1024 for line in start.splitlines() if line.startswith("RssAnon"))
    assert found["narrowed"] == 17
    assert found["checker"]
    assert peak["RssAnon"] - base < 0.6 * data
    assert not list(tmp_path.glob(SCRATCH))


def lies_in_a_file(array: np.ndarray) -> bool:
    base: Any = array
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    return base is not None


@pytest.mark.parametrize("compensate", ["grail", "best"])
@pytest.mark.parametrize("where", ["beside", "within"])
def test_new_weights_of_all_layers_wait_in_files(
    where: str, compensate: str, llama: Path, inline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelves, "SHELF", 256)
    ledgers = []
    whole = finish.narrowed

    def narrowed(prepared: Any, ledger: Any) -> ir.Model:
        ledgers.append(ledger)
        return whole(prepared, ledger)

    monkeypatch.setattr(finish, "narrowed", narrowed)
    data, source = ids(64), llama if where == "beside" else inline
    onnxgrail.compress(source, tmp_path / "small.onnx", data=data, unit_ratio=0.5, compensate=compensate)
    (ledger,) = ledgers
    assert len(ledger.arrays) >= 4
    assert all(lies_in_a_file(array) for array in ledger.arrays.values())


def test_weights_are_copied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "PIECE", 16)
    weights = np.arange(15, dtype=np.float32)  # four pieces, the last of them short
    (tmp_path / "weights").write_bytes(b"before!!" + weights.tobytes() + b"behind")
    with (tmp_path / "copy").open("wb") as file:
        Mapped(SteadyFile(tmp_path / "weights", ModelError), 8, ir.tensor(weights)).tofile(file)
    assert (tmp_path / "copy").read_bytes() == weights.tobytes()
