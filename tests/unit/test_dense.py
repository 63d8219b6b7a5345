"""Statistics of the original model: the naive sums, in one pass or several, and a file that knows its origin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.algebra.moments import triangles
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.calibration.stream import dense
from onnxgrail.calibration.streaming import of_blocks
from onnxgrail.core import Recipe
from onnxgrail.errors import DataError
from onnxgrail.graph.trace.survey import Survey
from onnxgrail.machine.job import Job
from tests.e2e import nets
from tests.oracle import prepared_of, survey_of
from tests.reading import read


def made(model: ir.Model, survey: Survey, batches: Batches, together: int = dense.TOGETHER) -> dense.Dense:
    prepared = prepared_of(model, survey, batches)
    job = Job(recipe=Recipe())
    return {block.name: stats for block, stats in of_blocks(prepared, job, survey.blocks, together=together)}


@pytest.fixture(scope="module")
def net() -> tuple[ir.Model, Survey, Batches]:
    model = ir.from_proto(nets.mlp())
    feed = nets.vectors()
    return model, survey_of(model, {"x": feed["x"][:2]}), read(feed, signature_of(model))


def test_sums_are_those_of_the_activations(net: tuple[ir.Model, Survey, Batches]) -> None:
    model, survey, batches = net
    values = {n: v.const_value.numpy() for n, v in model.graph.initializers.items() if v.const_value is not None}
    hidden = nets.run_mlp(values, nets.vectors())
    found = made(model, survey, batches)
    assert len(found) == 3
    for block in survey.blocks:
        (probe,), (stats,) = block.probes, found[block.name]
        x = hidden[probe.value][:, probe.index.ravel()]
        np.testing.assert_allclose(stats.gram, x.T @ x, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(stats.total, x.sum(axis=0), rtol=1e-4, atol=1e-3)
        assert stats.count == len(x)


def test_little_room_means_more_passes_and_the_same_sums(net: tuple[ir.Model, Survey, Batches]) -> None:
    at_once, one_by_one = made(*net), made(*net, together=1)
    assert [len(g) for g in dense.grouped(net[1].blocks, dense.size_of, 1)] == [1, 1, 1]
    assert [len(g) for g in dense.grouped(net[1].blocks, dense.size_of, 2**30)] == [3]
    for name, (stats,) in at_once.items():
        np.testing.assert_allclose(stats.gram, one_by_one[name][0].gram, rtol=1e-6)


@pytest.mark.parametrize(("square", "kind"), [(triangles.SQUARE, np.float64), (2, np.float32)])
def test_a_file_gives_back_what_was_kept(
    net: tuple[ir.Model, Survey, Batches], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, square: int, kind: type
) -> None:
    """In float64, or in float32 if it is wide."""
    monkeypatch.setattr(triangles, "SQUARE", square)
    model, survey, batches = net
    found = made(*net)
    dense.save(tmp_path / "s.npz", found, survey.blocks, model, batches)
    again = dense.load(tmp_path / "s.npz", survey.blocks[1:], model, batches)
    assert list(again) == [b.name for b in survey.blocks[1:]]
    for name, (stats,) in again.items():
        assert stats.gram.dtype == kind
        assert (stats.gram == found[name][0].gram).all()
        assert (stats.total == found[name][0].total).all()
        assert stats.count == found[name][0].count
    assert list(tmp_path.iterdir()) == [tmp_path / "s.npz"]


def test_a_file_is_refused_for_another_model_other_data_and_other_blocks(
    net: tuple[ir.Model, Survey, Batches], tmp_path: Path
) -> None:
    model, survey, batches = net
    path = tmp_path / "s.npz"
    dense.save(path, made(*net), survey.blocks[:2], model, batches)
    other = ir.from_proto(nets.mlp(seed=1))
    with pytest.raises(DataError, match="made from another model"):
        dense.load(path, survey.blocks[:2], other, batches)
    fewer = read(nets.vectors(), signature_of(model), samples=99)
    with pytest.raises(DataError, match="made from other data"):
        dense.load(path, survey.blocks[:2], model, fewer)
    with pytest.raises(DataError, match="hold nothing about block"):
        dense.load(path, survey.blocks, model, batches)
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "data.npz", x=np.ones(3))
    for name in ("text.npz", "data.npz", "absent.npz"):
        with pytest.raises(DataError, match="statistics"):
            dense.load(tmp_path / name, survey.blocks, model, batches)


def test_weights_beside_the_file_count(tmp_path: Path) -> None:
    import onnx

    keys = []
    for seed in (0, 1):
        path = tmp_path / f"{seed}.onnx"
        onnx.save(nets.mlp(seed=seed), path, save_as_external_data=True, location="w.data", size_threshold=0)
        keys.append(dense.model_key(ir.load(path)))
        (tmp_path / "w.data").unlink()
    assert keys[0] != keys[1]
