"""A model may come as a file with or without external data, as bytes, or as an object of three libraries."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
import onnxruntime
import pytest

import onnxgrail
from tests.command import run as cli
from tests.written import weights_of

from . import nets
from .decorated import values


@pytest.fixture
def inline(tmp_path: Path) -> Path:
    """The net as one file, `m.onnx`, with `d.npz`; beside it in `x/` with its weights in `m.onnx.data`."""
    onnx.save(nets.transformer(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **nets.tokens())
    (tmp_path / "x").mkdir()
    onnx.save(
        nets.transformer(),
        tmp_path / "x" / "m.onnx",
        save_as_external_data=True,
        location="m.onnx.data",
        size_threshold=1024,  # as exporters do: ONNX Runtime wants shapes in the model itself
    )
    return tmp_path / "m.onnx"


def command(*words: object) -> Any:
    return cli("compress", "--ratio=0.3", "--allocate=uniform", *words)


def run(path: Path) -> Any:
    """Return the outputs of a file in ONNX Runtime."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(["y"], nets.tokens(seed=5))[0]


def files(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def same(one: dict[str, bytes], two: dict[str, bytes]) -> bool:
    assert one.keys() == two.keys()
    return all(one[n] == two[n] for n in one)


@pytest.mark.parametrize("external", [False, True], ids=["inline", "external"])
def test_weights_in_a_second_file_make_no_difference(external: bool, inline: Path) -> None:
    """Also in a search for widths, which runs many candidates."""
    words = ("--data", inline.parent / "d.npz", *(["--allocate=auto"] if external else []))
    linked, expected = inline.parent / "x" / "m.onnx", inline.parent / "expected.onnx"
    assert command(inline, expected, *words).exit_code == 0
    result = command(linked, *words, *([] if external else ["--no-save-as-external-data"]))
    assert result.exit_code == 0, result.stderr
    made = linked.with_name("m.compressed.onnx")
    data = {weights_of(made).name} if external else set()
    assert files(linked.parent) == {"m.onnx", "m.onnx.data", "m.compressed.onnx"} | data
    assert same(values(onnx.load(made)), values(onnx.load(expected)))
    np.testing.assert_allclose(run(made), run(expected), atol=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--dry-run",),
        ("--save-as-external-data",),
        ("--no-check",),
        ("--no-check", "--dry-run"),
        ("--no-check", "--save-as-external-data"),
    ],
)
def test_even_small_weights_may_lie_in_a_second_file(words: tuple[str, ...], tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    onnx.save(nets.mlp(), model, save_as_external_data=True, location="w.bin", size_threshold=0)
    result = command(model, *words)
    assert result.exit_code == 0, result.stderr
    assert model.with_name("m.compressed.onnx").exists() is ("--dry-run" not in words)


def test_external_data_from_the_models_own_folder(inline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inline.parent / "x")
    result = command("m.onnx", "o.onnx", "--data", "../d.npz", "--save-as-external-data")
    assert result.exit_code == 0, result.stderr
    assert files(Path()) == {"m.onnx", "m.onnx.data", "o.onnx", weights_of(Path("o.onnx")).name}


@pytest.mark.parametrize("command", ["compress", "apply"])
def test_weights_stay_where_the_input_has_them(command: str, inline: Path) -> None:
    words: tuple[object, ...] = ("--data", inline.parent / "d.npz", "-q")
    recipe: list[Path] = []
    if command == "apply":
        recipe = [inline.parent / "r.json"]
        recipe[0].write_text('{"compensate": "none", "ratio": 0.3}')
    else:
        words += ("--ratio=0.3", "--allocate=uniform")
    for source, flag, beside in (
        (inline, None, False),
        (inline, "--save-as-external-data", True),
        (inline.parent / "x" / "m.onnx", None, True),
        (inline.parent / "x" / "m.onnx", "--no-save-as-external-data", False),
    ):
        target = inline.with_name(f"{source.parent.name}{flag}.onnx")
        done = cli(command, *recipe, source, target, *words, *([] if flag is None else [flag]))
        assert done.exit_code == 0, done.stderr
        assert len(list(target.parent.glob(f"{target.name}.*"))) == beside
    loaded = ir.load(inline.parent / "x" / "m.onnx")
    onnxgrail.compress(loaded, inline.with_name("loaded.onnx"), data=nets.tokens(), check=False, unit_ratio=0.3)
    assert weights_of(inline.with_name("loaded.onnx")).exists()


def test_save_as_external_data(inline: Path) -> None:
    plain, split = inline.with_name("plain.onnx"), inline.with_name("split.onnx")
    assert command(inline, plain, "--data", inline.parent / "d.npz").exit_code == 0
    result = command(inline, split, "--data", inline.parent / "d.npz", "--save-as-external-data")
    assert result.exit_code == 0, result.stderr
    shell = onnx.load(split, load_external_data=False)
    stored = [t for t in shell.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert {t.name for t in stored} >= {"table", "up0", "down0"}
    assert {e.value for t in stored for e in t.external_data if e.key == "location"} == {weights_of(split).name}
    assert split.stat().st_size < plain.stat().st_size / 2
    assert same(values(onnx.load(split)), values(onnx.load(plain)))
    onnx.checker.check_model(str(split), full_check=True)
    np.testing.assert_array_equal(run(split), run(plain))


def test_a_split_output_can_be_compressed_again_and_replaced(inline: Path) -> None:
    split = inline.with_name("split.onnx")
    first = ("--data", inline.parent / "d.npz", "--blocks", "mlp", "--save-as-external-data")
    assert command(inline, split, *first).exit_code == 0
    again = command(split, "--data", inline.parent / "d.npz", "--blocks", "heads", "--save-as-external-data")
    assert again.exit_code == 0, again.stderr
    assert run(split.with_name("split.compressed.onnx")).shape == (24, 10, 6)
    # With another ratio both files must be new, or the weights would not fit the graph.
    assert command(inline, split, *first, "--ratio", 0.5, "--allocate", "uniform", "--force").exit_code == 0
    assert dict(onnx_shapes(split))["up0"] == (32, 24)
    assert run(split).shape == (24, 10, 6)


def onnx_shapes(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    return [(t.name, tuple(t.dims)) for t in onnx.load(path).graph.initializer]


def test_every_kind_of_source_gives_the_same_weights(inline: Path) -> None:
    proto = nets.transformer()
    sources = {
        "path": str(inline),
        "bytes": proto.SerializeToString(),
        "proto": proto,
        "onnx_ir": ir.from_proto(proto),
        "graphsurgeon": gs.import_onnx(proto),
    }
    made = {}
    for name, source in sources.items():
        result = onnxgrail.compress(source, data=nets.tokens(), unit_ratio=0.5, dry_run=True)
        assert result.output is None
        model = onnx.ModelProto.FromString(nets.to_bytes(result.model))
        # GraphSurgeon renames nothing that has a name, but sorts.
        made[name] = dict(sorted(values(model).items()))
    assert proto.SerializeToString() == sources["bytes"]
    for name, weights in made.items():
        assert same(weights, made["path"]), name
    assert values(proto) != made["path"]


def test_an_object_is_written_only_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quiet = onnxgrail.compress(nets.mlp(), data=nets.vectors(), ratio=0.3)
    assert (quiet.output, files(tmp_path)) == (None, set())
    assert quiet.report.data["model"]["params_after"] < quiet.report.data["model"]["params_before"]
    written = onnxgrail.compress(nets.mlp(), tmp_path / "o.onnx", data=nets.vectors(), ratio=0.3)
    assert written.output == tmp_path / "o.onnx"
    assert files(tmp_path) == {"o.onnx"}


def test_a_result_can_be_compressed_again() -> None:
    once = onnxgrail.compress(nets.mlp((12, 64, 64, 10)), data=nets.vectors(), unit_ratio=0.5)
    twice = onnxgrail.compress(once.model, data=nets.vectors(), unit_ratio=0.5)
    assert [b["kept"] for b in twice.report.data["blocks"]] == [16, 16]
    once_more = onnx.ModelProto.FromString(nets.to_bytes(once.model))
    assert {t.name: tuple(t.dims) for t in once_more.graph.initializer}["w0"] == (32, 12)


def test_a_result_goes_from_process_to_process(tmp_path: Path) -> None:
    """A pool of processes pickles what its workers return."""
    result = onnxgrail.compress(nets.mlp(), tmp_path / "small.onnx", ratio=0.3)
    found = pickle.loads(pickle.dumps(result))
    assert found.to_bytes() == result.to_bytes()
    assert (found.output, found.gates_passed, str(found)) == (result.output, result.gates_passed, str(result))
