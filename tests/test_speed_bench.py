"""The bench of speed: its networks run, a cell measures what it says, and the page holds what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from bench.speed import nets, page
from bench.speed.__main__ import main
from bench.speed.cells import Cell, cells, measure
from tests.oracle import run


def tiny(name: str, *, latency: bool = False) -> Cell:
    def make(path: Path) -> Path:
        return nets.encoder(path, depth=1, width=64, tokens=4)

    return Cell(
        name=name, group="latency" if latency else "depth", make=make, shape=(4, 64), samples=8, latency=latency
    )


def test_an_encoder_keeps_the_scale_of_what_it_reads(tmp_path: Path) -> None:
    path = nets.encoder(tmp_path / "m.onnx", depth=3, width=64, tokens=4)
    onnx.checker.check_model(str(path))
    assert (tmp_path / "m.onnx.data").stat().st_size > 3 * 12 * 64 * 64 * 4
    x = np.random.default_rng(0).standard_normal((2, 4, 64), dtype=np.float32)
    (y,) = run(onnx.load(path).SerializeToString(), {"x": x}).values()
    assert y.shape == x.shape
    assert 0.5 < y.std() < 2.0


def test_a_residual_net_has_the_weights_of_the_real_one(tmp_path: Path) -> None:
    model = onnx.load(nets.resnet(tmp_path / "m.onnx", "resnet18"))
    count = sum(int(np.prod(weight.dims)) for weight in model.graph.initializer)
    assert count == 11_689_512 - 4_800  # torchvision's, less one of the two vectors of each folded normalisation


def test_a_cell_is_the_command_beside_a_forward_pass(tmp_path: Path) -> None:
    row = measure(tiny("one"), tmp_path, threads=1, rounds=1)
    assert row["exit"] == 0
    assert (tmp_path / "slim.onnx").exists()
    assert row["ratio"] == pytest.approx((row["seconds"] - 1.0) / row["forward"])
    assert 20 < row["anonymous"] <= row["rss"]
    assert "calibrate" in row["stages"]


def test_latency_is_held_against_the_work(tmp_path: Path) -> None:
    cell = tiny("two", latency=True)
    row = measure(cell, tmp_path, threads=1, rounds=1)
    assert row["ideal"] > 1.1
    assert row["share"] == pytest.approx((row["gain"] - 1) / (row["ideal"] - 1))


def test_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    numbers = dict.fromkeys(("forward", "seconds", "ratio", "cpu_ratio", "anonymous", "rss"), 2.5)
    data = {"environment": {}, "rows": {"a": {"name": "row a", "group": "depth", **numbers}}}
    (tmp_path / "r.json").write_text(json.dumps(data), encoding="utf-8")
    main(["--page-only", "--out", str(tmp_path / "r.json"), "--page", str(tmp_path / "p.md")])
    text = (tmp_path / "p.md").read_text(encoding="utf-8")
    assert text == page.page(data)
    assert "| row a | 2.50 |" in text
    assert page.TITLES["depth"] in text
    assert page.TITLES["width"] not in text


def test_a_row_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such row or group: nothing"):
        main(["--only", "nothing", "--out", str(tmp_path / "r.json"), "--page", str(tmp_path / "p.md")])
    assert len({(cell.group, cell.name) for cell in cells()}) == len(cells())


def test_the_limit_is_the_work_at_the_speed_of_a_product(tmp_path: Path) -> None:
    numbers = dict.fromkeys(("forward", "seconds", "ratio", "cpu_ratio", "anonymous", "rss"), 5.0)
    data = {"environment": {}, "rows": {"a": {"name": "row a", "group": "width", **numbers, "limit": 3.0}}}
    assert "| 3.00 | 0.75 |" in page.page(data)
    wide = {cell.name: cell.work for cell in cells()}
    assert wide["width 3072"] > 4 * wide["width 1536"] > 0
    assert wide["width 1536, best"] == 0
