"""Every file that a command writes needs --force where it exists, which is found out before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

import onnxgrail
from onnxgrail.errors import OutputError, UsageError
from tests.command import run

MINE = "somebody's own"


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    for name in (
        "r.json",
        "r.html",
        "r.yaml",
        "s.npz",
        "o.onnx",
        "figures/sizes.png",
        "out/digits_resnet.0.5.best.json",
    ):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(MINE)
    return folder


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


COMPRESS = ("compress", "m.onnx", "new.onnx", "--unit-ratio=0.3", "--data", "d.npz")
CASES = [
    (*COMPRESS[:2], "o.onnx", *COMPRESS[3:]),
    (*COMPRESS, "--report", "r.json"),
    (*COMPRESS, "--report", "new.json", "--report", "r.html"),
    (*COMPRESS, "--dry-run", "--report", "r.html"),
    (*COMPRESS, "--save-recipe", "r.yaml"),
    (*COMPRESS, "--save-recipe", "r.yaml", "--resume", "kept"),
    (*COMPRESS, "--save-stats", "s.npz"),
    ("apply", "recipe.yaml", "m.onnx", "--data", "d.npz", "--report", "r.json"),
    ("refine", "m.onnx", "new.onnx", "--reference", "m.onnx", "--data", "d.npz", "--report", "r.json"),
    ("inspect", "m.onnx", "--html", "r.html"),
    ("demo", "--model", "digits_resnet", "--ratio", "0.5", "--out", "out"),
]


@pytest.mark.parametrize("words", CASES, ids=lambda words: " ".join((words[0], *words[3:])))
def test_what_exists_stays(words: tuple[str, ...], place: Path) -> None:
    if words[0] == "refine":
        pytest.importorskip("torch")
    (place / "recipe.yaml").write_text("ratio: 0.5")
    before = listing(place)
    told = run(*words, "--verbose")
    assert (told.exit_code, told.stderr.splitlines()[-1].endswith("Use --force to replace it")) == (1, True), (
        told.output
    )
    after = {name: content for name, content in listing(place).items() if "/kept/" not in name}
    assert after == before


@pytest.mark.parametrize("words", [CASES[2], CASES[4], CASES[7], CASES[9]], ids=lambda words: words[0])
def test_force_replaces(words: tuple[str, ...], place: Path) -> None:
    (place / "recipe.yaml").write_text("ratio: 0.5")
    told = run(*words, "--force")
    assert told.exit_code == 0, told.output
    assert (place / words[-1]).read_bytes() != MINE.encode()


def test_a_run_that_goes_on_replaces_its_own(place: Path) -> None:
    words = (
        *COMPRESS,
        "--resume",
        "kept",
        "--report",
        "a.json",
        "--save-recipe",
        "a.yaml",
        "--save-stats",
        "a.npz",
        "-q",
    )
    for _ in range(2):
        told = run(*words)
        assert told.exit_code == 0, told.output
    assert "exists. Use --force" in run(*words, "--report", "r.json").stderr


def test_reports_of_python_stay_too(place: Path) -> None:
    result = onnxgrail.compress("m.onnx", data="d.npz", dry_run=True, report="new.json", unit_ratio=0.3)
    with pytest.raises(OutputError, match=r"--report 'r.json' exists. Use --force"):
        onnxgrail.compress("m.onnx", data="absent.npz", dry_run=True, report="r.json", unit_ratio=0.3)
    with pytest.raises(OutputError, match=r"report 'r.json' exists"):
        result.report.save("r.json")
    result.report.save("r.json", force=True)
    for name, what in (("m.onnx", "the input"), ("d.npz", "the calibration data")):
        with pytest.raises(OutputError, match=f"is {what}. What is read is never replaced"):
            result.report.save(name, force=True)
    for name in ("new.onnx", "new", "r.yaml"):
        with pytest.raises(UsageError, match=r"has an unknown suffix. Choose from .json, .html, .htm"):
            onnxgrail.inspect("m.onnx", report=name, force=True)
    found = onnxgrail.inspect("m.onnx")
    with pytest.raises(OutputError, match=r"report 'r.html' exists"):
        found.save("r.html")
    with pytest.raises(OutputError, match="is the model"):
        found.save("m.onnx", force=True)
    found.save("r.html", force=True)
    assert Path("r.html").read_text().startswith("<!")
