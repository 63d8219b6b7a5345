"""The folder of `--resume`: what it keeps, and whom it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from onnxgrail.core import BlockError, Change, Outcome, Reducer
from onnxgrail.errors import DataError, OutputError, UsageError
from onnxgrail.machine.steps import journal
from onnxgrail.machine.steps.codec import Record, change_of, decode, encode, of_change
from onnxgrail.machine.steps.journal import Folder
from tests.unit.test_order import block

RUN = {"model": "a" * 64, "recipe": {"ratio": 0.3, "blocks": ("mlp",)}, "threads": 1}


def begun(place: Path) -> Folder:
    folder = Folder(place)
    folder.begin(RUN)
    return folder


def test_records_come_back_bit_for_bit() -> None:
    arrays = {
        "a/b": np.array([[0.1, -0.0], [np.nan, 1e-310]]),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "short": np.array([1.5, -2.0], ml_dtypes.bfloat16),
        "": np.zeros((0, 3), bool),
    }
    found = decode(encode(Record(arrays=arrays, notes={"x": [np.int64(1), None, np.float64(0.1)]})))
    assert found.notes == {"x": [1, None, 0.1]}
    assert list(found.arrays) == list(arrays)
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert found.arrays[name].shape == array.shape
        assert found.arrays[name].tobytes() == array.tobytes()


def test_bytes_that_are_no_record() -> None:
    with pytest.raises(DataError):
        decode(encode(Record(arrays={"a": np.zeros(100)}))[:-200])


def test_a_change_comes_back() -> None:
    change = Change(
        block=block(0, 3),
        reducer=Reducer(kept=np.array([1, 2]), cluster=np.array([0, 0, 1, 1, 0, 0, 1, 1])),
        weights=((3, np.full((2, 1, 4), 0.1)), (0, np.ones((2, 1, 1)))),
        outcome=Outcome(status="damped", reason="why"),
        error=BlockError(plain=0.1, compensated=None, validation=0.3),
    )
    found = change_of(decode(encode(of_change(change))), change.block)
    assert (found.block, found.outcome, found.error) == (change.block, change.outcome, change.error)
    assert found.reducer.kept.tolist() == [1, 2]
    assert found.reducer.cluster is not None
    assert found.reducer.cluster.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [number for number, _ in found.weights] == [3, 0]
    np.testing.assert_array_equal(found.weights[0][1], change.weights[0][1])


def test_steps_are_kept_and_found_by_the_next_run(tmp_path: Path) -> None:
    first = begun(tmp_path / "kept")
    first.put("block a", Record(arrays={"x": np.arange(3)}, notes={"n": 1}))
    first.close()
    second = begun(tmp_path / "kept")
    found = second.get("block a")
    assert found is not None
    assert found.notes == {"n": 1}
    assert found.arrays["x"].tolist() == [0, 1, 2]
    assert second.get("block b") is None


def test_a_damaged_step_is_done_again(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    folder.put("a", Record(arrays={"x": np.arange(1000)}))
    (step,) = (tmp_path / "steps").iterdir()
    step.write_bytes(step.read_bytes()[:700])
    assert folder.get("a") is None


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    begun(tmp_path).close()
    other = Folder(tmp_path)
    with pytest.raises(UsageError, match=r"ratio was 0.3, now 0.5; threads was 1, now 2.*another folder"):
        other.begin({**RUN, "recipe": {"ratio": 0.5, "blocks": ["mlp"]}, "threads": 2})


def test_two_runs_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "PATIENCE", 0.1)
    first = begun(tmp_path)
    with pytest.raises(OutputError, match="another run works in"):
        Folder(tmp_path)
    first.close()
    Folder(tmp_path).close()


@pytest.mark.skipif(os.name == "nt", reason="no locks")
def test_a_run_waits_for_one_that_was_just_killed_and_reads_what_that_wrote(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from onnxgrail.machine.steps.journal import Folder
folder = Folder(Path({str(tmp_path)!r}))
print("locked", flush=True)
sys.stdin.readline()
time.sleep(0.3)
folder.begin({RUN!r})
folder.about_to_write(Path("o.onnx"))
"""
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as dying:
        assert dying.stdout is not None
        assert dying.stdin is not None
        dying.stdout.readline()
        dying.stdin.write("\n")
        dying.stdin.flush()
        second = Folder(tmp_path)
    assert second.writes(tmp_path / "o.onnx")
    second.close()


def test_what_a_killed_run_left_is_no_other_file(tmp_path: Path) -> None:
    (tmp_path / ".onnxgrail-0a1b2c3d-abcdefgh").mkdir()
    begun(tmp_path).close()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(OutputError, match=r"holds other files \(thesis.tex\)"):
        Folder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_broken_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(OutputError, match="is not a manifest"):
        Folder(tmp_path)


def test_folders_above_it_are_made(tmp_path: Path) -> None:
    begun(tmp_path / "a" / "b").close()
    assert (tmp_path / "a" / "b" / "manifest.json").exists()


def test_what_others_keep_in_a_folder_called_scratch_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds other files \(scratch\)"):
        Folder(tmp_path)
    assert (tmp_path / "scratch" / "notes.txt").read_text() == "mine"


def test_own_files_may_be_replaced(tmp_path: Path) -> None:
    folder = begun(tmp_path / "kept")
    mine = tmp_path / "out.onnx"
    assert not folder.writes(mine)
    folder.about_to_write(mine)
    folder.finish()
    folder.close()
    again = Folder(tmp_path / "kept")
    assert again.writes(mine)
    assert not again.writes(tmp_path / "other.onnx")
    assert json.loads((tmp_path / "kept" / "manifest.json").read_text())["done"]


def test_drafts_of_a_killed_run_are_cleared_away(tmp_path: Path) -> None:
    folder = begun(tmp_path / "kept")
    scratch = folder.scratch(tmp_path / "out.onnx")
    assert scratch is not None
    (scratch / "half").write_text("x")
    folder.close()
    begun(tmp_path / "kept")
    assert list(scratch.iterdir()) == []
