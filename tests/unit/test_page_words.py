"""The page shows fidelity and latency with an interval or a caveat for each number."""

from __future__ import annotations

from typing import Any

import pytest

from onnxgrail.report.page import report_page
from tests.page_data import encoder
from tests.unit.test_page import Page
from tests.verdicts import checked, output, verdict


def test_the_head_shows_the_worst_output_with_its_interval() -> None:
    worse = output("scores", verdict("scores", 0.44, part="columns 4 to 84"))
    data = encoder(verification=checked(worse, output("last_hidden_state", verdict())))
    page = Page(report_page(data)).text
    head = page[: page.index("Before and after")].replace("\u00a0", " ")
    assert "F1 of scores above 0.5" in head
    assert "44.0 %" in head
    assert "43.0 to 45.0 %, lowest sample 34.0 %; scores, columns 4 to 84 on 16 held-out samples" in head
    assert "0.948" not in head
    assert "scores: named so" in page
    assert "--held-out" not in page


@pytest.mark.parametrize(
    ("on", "said", "advice"),
    [
        (
            "calibration",
            "16 calibration samples; the fit has seen these samples",
            "The fit has seen these samples: give 32",
        ),
        ("random", "not known random inputs say nothing about quality", "Give --data with real samples"),
    ],
)
def test_a_head_that_says_little_says_so(on: str, said: str, advice: str) -> None:
    data = encoder(verification=checked(output("y", verdict(value=1.0)), on=on))
    page = Page(report_page(data))
    head = page.text[: page.text.index("Before and after")]
    assert said.replace("not known random", "not knownrandom") in head
    assert advice in page.text
    assert ("1.0000" in head) is (on != "random")
    assert any("silent" in str(tag.get("class")) for tag in page.named("div")) is (on == "random")


def step(name: str, median: float, ratio: float | None = None, interval: list[float] | None = None) -> dict[str, Any]:
    rest = {"mean": median, "p90": median, "p99": median, "spread": 0.1}
    return {"name": name, "median": median, "ratio": ratio, "interval": interval} | rest


def test_latency_is_told_as_far_as_noise_allows() -> None:
    steps = [step("original", 10.0), step("narrowed", 8.0, 1.25, [1.2, 1.3]), step("quantized", 9.9, 1.01, [0.9, 1.1])]
    page = Page(report_page(encoder(latency=steps))).text
    assert "1.25 times as fast (1.20 to 1.30)" in page
    head = page[: page.index("Before and after")]
    assert "Latencyno measurable difference10 ms \u2192 9.9 ms; 0.90 to 1.10 times as fast" in head.replace(
        "\u00a0", " "
    )
    assert "no measurable difference (0.90 to 1.10 times as fast)" in page
    sure = Page(report_page(encoder(latency=steps[:2]))).text
    assert "Latency\u221220.0 %10 ms \u2192 8 ms; 1.20 to 1.30 times as fast" in sure.replace("\u00a0", " ")
