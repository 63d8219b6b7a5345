"""docs/data.md is run: its commands work on small files of every kind, and it names all of them."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from onnxgrail.calibration.feeds.kinds import KINDS
from onnxgrail.cli import main
from tests.e2e import test_data_kinds as made
from tests.shorter import short
from tests.unit import samples

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^<!-- run -->\n```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the page speaks of."""
    monkeypatch.chdir(tmp_path)
    Path("image.onnx").write_bytes(short("digits_vit"))
    Path("text.onnx").write_bytes(short("char_llama"))
    shutil.copy(ROOT / "models" / "data" / "digits_vit.heldout.npz", "image.heldout.npz")
    images = made.calibration("digits_vit", 8)["images"]
    Path("arrays").mkdir()
    np.savez("calib.npz", images=images)
    np.save("calib.npy", images)
    np.savez("arrays/1.npz", images=images)
    samples.images(Path("photos"), 4)
    made.letters(tmp_path)
    Path("text.txt").rename("corpus.txt")
    made.dataset(tmp_path)
    made.protobufs(tmp_path)
    made.polygraphy(tmp_path)
    Path("d.json").rename("inputs.json")
    source = re.search(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert source is not None
    Path("feeds.py").write_text(source[1])
    return tmp_path


def test_every_command_is_run() -> None:
    assert sum(block.count("onnxgrail compress") for block in BLOCKS) == PAGE.count("onnxgrail compress ")


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_commands(block: str, folder: Path) -> None:
    for line in block.splitlines():
        program, command, *words = shlex.split(line)
        assert program == "onnxgrail"
        # The cheapest fit: what is tested is the way of the data.
        cheap = ["--blocks", "mlp", "--compensate", "grail", "--allocate", "uniform"] if command == "compress" else []
        result = CliRunner().invoke(main, [command, *words, *cheap])
        assert result.exit_code == 0, f"{line}\n{result.stderr}"


def test_every_kind_has_its_row_in_order() -> None:
    rows = [line.split("|")[1].replace("`", "").strip() for line in PAGE.splitlines() if line.startswith("|")]
    assert rows[2 : 2 + len(KINDS)] == list(KINDS)
