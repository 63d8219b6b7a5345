"""A number and its limit in a message differ wherever the numbers do."""

from __future__ import annotations

import pytest

from onnxgrail.cli.parts.render import apart
from onnxgrail.report.summary import search_text


@pytest.mark.parametrize(
    ("value", "limit", "told"),
    [
        (0.25, 0.1, ("0.25", "0.1")),
        (0.9999962139504005, 0.9999999, ("0.999996", "0.9999999")),
        (0.99999621, 1.0, ("0.999996", "1")),
        (0.91, 0.95, ("0.91", "0.95")),
    ],
)
def test_digits(value: float, limit: float, told: tuple[str, str]) -> None:
    assert apart(value, limit) == told


@pytest.mark.parametrize(("output", "told"), [("boxes", "(loss, output boxes), "), ("", "(loss), ")])
def test_a_metric_of_all_outputs_names_none(output: str, told: str) -> None:
    loss = {"mean": 0.05, "bound": 0.06, "name": "loss", "output": output, "samples": 64}
    search = {"chosen": 0, "limit": 0.1, "crossed": True, "tried": [{"loss": loss}]}
    assert told in search_text({"allocation": {"search": search}})
