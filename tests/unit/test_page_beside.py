"""The page of two reports: whole, valid, escaped, and about what differs."""

from __future__ import annotations

import copy
import re
from typing import Any

from onnxgrail.report.page import beside, inspection_page, pair_page, report_page
from tests.page_data import block, encoder, inspection
from tests.unit.test_page import EVIL, Page, evil


def other(layers: int = 6) -> dict[str, Any]:
    """A report on the same model, with another ratio, narrower blocks and one block more."""
    found = copy.deepcopy(encoder(layers))
    found["recipe"] |= {"ratio": 0.5, "selector": "obs"}
    found["model"] |= {"output": "half.onnx", "params_after": 15_000_000, "asked_ratio": 0.5}
    for one in found["blocks"]:
        one["kept"] //= 2
    found["blocks"].append(block("mlp", layers))
    return found


def test_it_is_a_valid_page_without_requests() -> None:
    source = pair_page(encoder(curves=True), other())
    page = Page(source)
    assert "None" not in page.text
    identities = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identities) == len(set(identities))
    assert {str(a["href"]).removeprefix("#") for a in page.named("a")} <= set(identities)
    assert not re.search(r"https?:|url\(|@import|\bsrc=", source)
    assert len(page.named("table")) == len(page.named("caption")) >= 4


def test_it_shows_what_differs() -> None:
    a, b = encoder(2), other(2)
    assert beside.sizes(a, b)[0] == ("Parameters", "22.57\u00a0M", "19.24\u00a0M", "15.00\u00a0M", "−22.0\u00a0%")
    assert beside.choices(a, b) == [("--ratio", "0.3", "0.5"), ("--selector", "–", "obs")]
    paired = beside.blocks(a, b)
    assert [(one.any.name, one.a is None, one.b is None) for one in paired][-2:] == [
        ("bert.encoder.layer.1.mlp", False, False),
        ("bert.encoder.layer.2.mlp", True, False),
    ]
    text = Page(pair_page(a, b)).text
    for words in ("small.onnx and half.onnx", "1,072 of 1,536", "536 of 1,536", "no such block"):
        assert words in text


def test_equal_reports_differ_in_nothing() -> None:
    assert [one.title for one in beside.tables(encoder(), encoder())] == ["", "Results"]
    assert beside.notes(encoder(), encoder()) == ()


def test_what_hinders_comparing_is_said() -> None:
    a, b = encoder(), other()
    b["model"]["sha256_before"] = "2" * 64
    b["verification"]["judged"] |= {"samples": 7}
    b["model"]["params_before"] += 1
    told = beside.notes(a, b)
    assert [words in one for words, one in zip(("not the same file", "7 samples"), told, strict=True)] == [True, True]
    assert beside.sizes(a, b)[0][1] == "–"
    assert all(one in Page(pair_page(a, b)).text for one in told)


def test_no_text_of_two_models_becomes_markup() -> None:
    clean, page = Page(pair_page(encoder(), other())), Page(pair_page(evil(encoder()), evil(other())))
    for tag in ("script", "style", "img", "title", "meta", "a"):
        assert len(page.named(tag)) == len(clean.named(tag))
    assert not [attributes for _, attributes in page.tags if any(key.startswith("on") for key in attributes)]
    assert EVIL.replace("\u202e", "\ufffd").replace("\x00", "\ufffd") in page.text


def test_a_block_lists_its_nodes_and_weights() -> None:
    data = encoder(1)
    data["blocks"][0] |= {"nodes": ["/up/MatMul", "/down/MatMul"]}
    text = Page(report_page(data)).text
    assert "nodes /up/MatMul, /down/MatMul" in text
    assert "read by w0" in text
    found = inspection(1)
    found["blocks"][0] |= {"nodes": [f"n{n}" for n in range(40)], "producers": ["w1"], "consumers": ["w2"]}
    text = Page(inspection_page(found)).text
    assert "n29 and 10 more" in text
    assert ("made by w1" in text, "read by w2" in text) == (True, True)
