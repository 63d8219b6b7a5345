"""A journal in memory of the steps of a search."""

from __future__ import annotations

from onnxgrail.machine.steps.codec import Record
from onnxgrail.machine.steps.journal import Searched


def test_steps_of_a_search_alone_are_kept() -> None:
    journal = Searched()
    for key in ("harm a", "fitted b", "compared c", "loss d", "allocation", "block a"):
        journal.put(key, Record(notes={"key": key}))
    found = {key: journal.get(key) for key in ("harm a", "fitted b", "compared c", "loss d", "loss e", "block a")}
    assert [key for key, record in found.items() if record is not None] == [
        "harm a",
        "fitted b",
        "compared c",
        "loss d",
    ]
    assert journal.get("allocation") is None


def test_a_corrected_step_hides_the_one_before() -> None:
    before = Searched()
    before.put("loss a", Record(notes={"loss": 1}))
    before.put("loss b", Record(notes={"loss": 2}))
    after = Searched(before)
    after.put("loss a", Record(notes={"loss": 3}))
    found = [journal.get(key) for journal in (before, after) for key in ("loss a", "loss b")]
    assert [record.notes["loss"] for record in found if record is not None] == [1, 2, 3, 2]
