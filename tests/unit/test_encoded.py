"""A decoder beside an encoder reads the tokens that it writes itself, one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrail.calibration.feeds.encoded import encoded
from onnxgrail.job.exported import exported_of
from tests.tiny import tiny

WORDS = 7
NEXT = np.eye(WORDS, dtype=np.float32)[:, np.roll(np.arange(WORDS), 1)]  # the token after t is t + 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An encoder, and a decoder that counts on from its last token."""
    encoder = "h = Gather(table, input_ids)"
    decoder = """
        e = Gather(next, input_ids)
        zero = Constant<value_float = 0.0>()
        h = Mul(encoder_hidden_states, zero)
        one = Constant<value_ints = [1]>()
        m = ReduceMean(h, one)
        logits = Add(e, m)
    """
    eye = np.eye(WORDS, dtype=np.float32)
    texts = "int64[batch,seq] input_ids"
    models = {
        "encoder_model": tiny(f"{texts} => float[batch,seq,{WORDS}] h", encoder, {"table": eye}),
        "decoder_model": tiny(
            f"{texts}, int64[batch,past] encoder_attention_mask, float[batch,past,{WORDS}] encoder_hidden_states"
            f" => float[batch,seq,{WORDS}] logits",
            decoder,
            {"next": NEXT},
        ),
    }
    for name, model in models.items():
        onnx.save(ir.to_proto(model), tmp_path / f"{name}.onnx")
    return tmp_path


@pytest.mark.parametrize("start", [None, 5])
def test_a_decoder_reads_what_it_writes(start: int | None, folder: Path) -> None:
    ids = np.array([[3, 1, 4, 1], [2, 2, 2, 2]])
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    (feed,) = encoded(folder / "encoder_model.onnx", folder / "decoder_model.onnx", [given], start)
    assert feed["input_ids"].tolist() == (ids.tolist() if start is None else [[5, 6, 0, 1]] * 2)
    np.testing.assert_array_equal(feed["encoder_hidden_states"], np.eye(WORDS)[ids])
    assert feed["encoder_attention_mask"].shape == ids.shape


@pytest.mark.parametrize(
    ("files", "token"),
    [
        ({}, None),
        ({"config.json": {"decoder_start_token_id": 2}}, 2),
        ({"config.json": {"decoder_start_token_id": 2}, "generation_config.json": {"decoder_start_token_id": 4}}, 4),
        ({"config.json": {"decoder_start_token_id": None}}, None),
        ({"config.json": [1], "generation_config.json": "broken"}, None),
    ],
)
def test_the_first_token_is_that_of_the_configuration(
    files: dict[str, object], token: int | None, folder: Path
) -> None:
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert exported_of(folder).start() == token
