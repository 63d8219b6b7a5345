from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.core import Block, BlockError, Change, Outcome, Probe, Recipe, Reducer, Refusal, Slot, Status
from onnxgrail.errors import ModelError, OutputError
from onnxgrail.machine.files import paths
from onnxgrail.machine.files.paths import check_input, check_output, default_output, write_text
from onnxgrail.machine.job import Job
from onnxgrail.report.build import block_entry
from onnxgrail.report.environment import calibration_entry
from onnxgrail.report.report import Inspection, ModelChange, Report, Verification
from onnxgrail.report.sections import Sections, make_report
from onnxgrail.report.summary import OUTCOMES, nothing_text, outcome_text, refusal_counts, summary_rows

REFUSALS = (
    Refusal(value="a", node="n1", op="Foo", reason="no rule for Foo-1"),
    Refusal(value="b", node="n2", op="Foo", reason="no rule for Foo-1"),
    Refusal(value="c", node="n3", op="Add", reason="graph output"),
)
SIZES = {"w1": (6, 5), "b1": (6,), "w2": (4, 8)}


def block():
    """Three units of two members each; the consumer's axis has two positions of somebody else in front."""
    index = np.arange(6).reshape(3, 2)
    slots = (
        Slot(param="w1", initializer="w1", axis=0, index=index, role="producer"),
        Slot(param="b1.copy", initializer="b1", axis=0, index=index, role="passenger"),
        Slot(param="w2", initializer="w2", axis=1, index=index + 2, role="consumer", probe=0),
    )
    probes = (Probe(value="h", axis=1, index=index, pooled=False),)
    return Block(
        name="mlp.0",
        kind="mlp",
        units=3,
        unit_size=2,
        slots=slots,
        probes=probes,
        ids=np.arange(3),
        span=(0, 3),
        nodes=("a", "b"),
    )


def change(**options):
    return Change(
        block=block(), reducer=Reducer(kept=np.array([0, 2]), cluster=options.pop("cluster", None)), **options
    )


def test_members_keep_every_position_the_block_does_not_drop():
    entry = block_entry(block(), change(error=BlockError(plain=0.5, compensated=0.1)), SIZES)
    assert (entry["kept"], entry["kept_units"], entry["exact"]) == (2, [0, 2], True)
    assert [m["kept"] for m in entry["members"]] == [[0, 1, 4, 5], [0, 1, 4, 5], [0, 1, 2, 3, 6, 7]]
    assert [m["role"] for m in entry["members"]] == ["producer", "passenger", "consumer"]
    assert entry["members"][1]["initializer"] == "b1"
    assert all(m["cluster"] is None for m in entry["members"])
    assert entry["error"] == {"plain": 0.5, "compensated": 0.1, "validation": None}
    assert entry["outcome"] == {"status": "ok", "reason": "", "clamped": 0}


def test_two_slots_on_one_axis_drop_together():
    index = np.arange(2).reshape(2, 1)
    slots = tuple(Slot(param="w", initializer="w", axis=0, index=index + k, role="consumer", probe=0) for k in (0, 2))
    twice = Block(
        name="b", kind="conv", units=2, unit_size=1, slots=slots, probes=(), ids=index[:, 0], span=(0, 1), nodes=()
    )
    entry = block_entry(twice, Change(block=twice, reducer=Reducer(kept=np.array([1]))), {"w": (5,)})
    assert [m["kept"] for m in entry["members"]] == [[1, 3, 4]] * 2


def test_folds_name_the_cluster_of_every_unit():
    entry = block_entry(block(), change(cluster=np.array([0, 0, 1])), SIZES)
    assert entry["members"][0]["cluster"] == [0, 0, 1]


@pytest.mark.parametrize("decided", [None, change(outcome=Outcome(status="skipped", reason="singular"))])
def test_untouched_blocks_keep_everything(decided):
    entry = block_entry(block(), decided, SIZES)
    assert entry["kept"] == 3
    assert entry["outcome"]["status"] == "skipped"
    assert entry["outcome"]["reason"]
    assert [len(m["kept"]) for m in entry["members"]] == [6, 6, 8]


def report(**options):
    sizes = ModelChange(
        input="a.onnx",
        output="b.onnx",
        sha256_before="0" * 64,
        sha256_after="1" * 64,
        params_before=1000,
        params_after=700,
        macs_before=2000,
        macs_after=1000,
        bytes_before=4000,
        bytes_after=2800,
        asked_ratio=0.3,
        achieved_ratio=0.31,
        ratio_of="blocks",
        ratio_total=900,
        model_ratio=0.3,
    )
    job = Job(recipe=Recipe(input_shapes={"x": (1, 3)}))
    job.clock.seconds["trace"] = 0.123456
    sections = Sections(
        model=sizes,
        blocks=[block_entry(block(), change(), SIZES)],
        refusals=REFUSALS,
        verification=Verification(
            checker=True, outputs=({"name": "y", "cosine": 0.9, "nmse": float("inf"), "max_abs": np.float32(1)},)
        ),
        calibration=calibration_entry(Batches(feeds=(), samples=8, source="d.npz")),
        **options,
    )
    return make_report(job, sections)


def test_schema_1_is_complete_and_survives_json():
    text = report(notes=("hm",)).to_json()
    data = json.loads(text)
    assert data["schema"] == 1
    assert set(data) >= {
        *("schema", "tool", "recipe", "environment", "model", "blocks", "refusals", "verification", "timing"),
        "peak_rss_bytes",
    }
    assert set(data["environment"]) >= {"onnx", "onnxruntime", "numpy", "providers", "threads"}
    assert set(data["model"]) == {
        *("input", "output", "sha256_before", "sha256_after", "params_before", "params_after", "macs_before"),
        *("macs_after", "bytes_before", "bytes_after", "asked_ratio", "achieved_ratio", "budget"),
        *("ratio_of", "ratio_total", "model_ratio"),
        *("sha256_data_before", "sha256_data_after"),
    }
    assert data["verification"]["outputs"][0] == {"name": "y", "cosine": 0.9, "nmse": None, "max_abs": 1.0}
    assert data["recipe"]["input_shapes"] == {"x": [1, 3]}
    assert data["peak_rss_bytes"] > 1e6
    assert Report.from_json(text).to_json() == text


def test_the_peak_of_memory_is_that_of_the_process_itself():
    held = np.ones(2**26)  # 512 MiB, which a new process must not count
    code = "from onnxgrail.machine.memory import peak_rss_bytes; print(peak_rss_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < held.nbytes / 2


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}'])
def test_other_json_is_refused(text):
    with pytest.raises(ModelError, match="not a report"):
        Report.from_json(text)


def test_summary():
    rows = summary_rows(report().data)
    assert [(r.label, r.before, r.after, r.unit) for r in rows] == [
        ("Parameters", 1000, 700, "count"),
        ("MACs", 2000, 1000, "count"),
        ("File size", 4000, 2800, "bytes"),
        ("MLP neurons (1 of 1 block narrowed)", 3, 2, "count"),
    ]


def test_refusals_are_counted_by_reason():
    expected = (("no rule for Foo-1", 2), ("graph output", 1))
    assert refusal_counts(REFUSALS) == refusal_counts(report().data["refusals"]) == expected
    assert nothing_text(REFUSALS) == "nothing could be compressed: no rule for Foo-1 (2x); graph output (1x)"
    assert "no channels" in nothing_text(())


def test_reasons_that_differ_in_a_measured_number_are_counted_together():
    reason = "the narrowed graph differs from the masked one by {} at scores".format
    found = refusal_counts([{"reason": reason(gap)} for gap in ("6.0e-04", "1.5e-02", "1.5e-02")])
    assert found == ((reason("up to 1.5e-02"), 3),)
    assert refusal_counts([{"reason": reason("1.5e-02")}] * 2) == ((reason("1.5e-02"), 2),)


def test_how_a_block_went_is_told_in_words():
    assert set(OUTCOMES) == set(get_args(Status)) - {"ok"}
    assert outcome_text({"status": "ok", "reason": "2 of 3 consumers keep plain weights"}) == ""
    assert outcome_text({"status": "plain", "reason": "no use"}) == "narrowed without repair: no use"
    assert outcome_text({"status": "skipped", "reason": ""}) == "left at full width"


def test_inspection_is_json():
    found = Inspection(path="a.onnx", params=10, macs=None, bytes=40, blocks=(), refusals=REFUSALS)
    assert json.loads(found.to_json())["refusals"][2] == {
        "value": "c",
        "node": "n3",
        "op": "Add",
        "reason": "graph output",
        "position": None,
    }


def test_outputs_are_checked_before_the_work(tmp_path):
    source = tmp_path / "m.onnx"
    source.write_bytes(b"x")
    target = default_output(source)
    assert target == tmp_path / "m.compressed.onnx"
    check_output(target)
    target.write_bytes(b"y")
    check_output(target, force=True)
    check_output(tmp_path / "no" / "m.onnx")  # the folder is made when there is something to write
    assert not (tmp_path / "no").exists()
    for wrong, message in [
        (target, "exists. Use --force"),
        (tmp_path, "is a folder"),
        (Path("/dev/null"), "is not a regular file"),
        (source / "m.onnx", "is not a folder"),
    ]:
        with pytest.raises(OutputError, match=message):
            check_output(wrong)
    with pytest.raises(ModelError, match="no file"):
        check_input(tmp_path / "absent.onnx")


def test_a_link_among_the_devices_is_never_replaced(tmp_path, monkeypatch):
    """/dev/stdout leads to a regular file if the output of the command goes to one."""
    (tmp_path / "out.txt").write_text("")
    (tmp_path / "stdout").symlink_to(tmp_path / "out.txt")
    check_output(tmp_path / "stdout", force=True)
    monkeypatch.setattr(paths, "DEVICES", tmp_path)
    with pytest.raises(OutputError, match="is not a regular file"):
        check_output(tmp_path / "stdout", force=True)


def test_a_folder_that_cannot_be_written(tmp_path):
    source = tmp_path / "m.onnx"
    source.write_bytes(b"x")
    with pytest.raises(OutputError, match="cannot write to folder"):
        check_output(Path("/proc/m.onnx"))


def test_text_is_written_whole_or_not_at_all(tmp_path):
    write_text(tmp_path / "r.json", "text")
    (tmp_path / "taken").mkdir()
    with pytest.raises(OutputError):
        write_text(tmp_path / "taken", "text")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json", "taken"]
