"""Checks of a release: every folder and file of the package, one version, and a description whose links work."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from importlib.metadata import version as installed
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import onnxgrail
from onnxgrail import models

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MODELS = tomllib.loads((ROOT / "models" / "pyproject.toml").read_text(encoding="utf-8"))
BESIDE = {"onnxgrail.cli": "cli", "onnxgrail.models": "models"}
OTHERS = {"models": {"README.md", "pyproject.toml"}}  # what builds onnxgrail-models
LIMIT = 1_500_000
BUILD = "import sys; from setuptools.build_meta import build_wheel as build; print(build(sys.argv[1]))"
FROM_WHEELS = """
import pathlib, sys
sys.path[:0] = sys.argv[1:]
import onnxgrail
from onnxgrail import cli, models
assert pathlib.Path(models.__file__).is_relative_to(sys.argv[1]), models.__file__
try:
    print(*models.manifest(), *(models.load(name).model.stat().st_size for name in models.names()))
except onnxgrail.MissingExtraError as error:
    print(error)
    cli.main(["demo", "--model", "digits_vit"])
"""


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def folder_of(package: str) -> Path:
    """Return where a package stands in the repository."""
    top = ".".join(package.split(".")[:2])
    return ROOT / (BESIDE[top] + package[len(top) :] if top in BESIDE else package).replace(".", "/")


def test_every_folder_is_a_package_of_the_wheel(setup: ModuleType) -> None:
    sources = [file for top in ("onnxgrail", "cli", "models") for file in (ROOT / top).rglob("*.py")]
    beside = {models.folder()}
    assert {folder_of(package) for package in setup.packages()} == {file.parent for file in sources} - beside


def test_every_file_is_in_the_wheel(setup: ModuleType) -> None:
    stated = PROJECT["tool"]["setuptools"]["package-data"]
    for package in setup.packages():
        patterns = ["*.py", *stated.get(package, [])]
        other = OTHERS.get(folder_of(package).name, ())
        files = [file for file in folder_of(package).iterdir() if file.is_file() and file.name not in other]
        assert [f.name for f in files if not any(fnmatch(f.name, one) for one in patterns)] == [], package


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheels of onnxgrail and of onnxgrail-models, built by setuptools from a copy of the repository."""
    if int(installed("setuptools").partition(".")[0]) < 77:
        pytest.skip("setuptools is older than 77: pip install '.[test]'")
    folder = tmp_path_factory.mktemp("wheels")
    for name in ("onnxgrail", "cli", "models"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
    found = []
    for place in (folder, folder / "models"):
        call = [sys.executable, "-c", BUILD, str(folder)]
        done = subprocess.run(call, cwd=place, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        found.append(folder / done.stdout.split()[-1])
    return found[0], found[1]


def names(wheel: Path) -> set[str]:
    """Return the files of a wheel without those that describe it."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_wheels_hold_what_they_should(wheels: tuple[Path, Path], setup: ModuleType) -> None:
    ours, data = wheels
    assert names(data) == {f"onnxgrail_models/{f.name}" for f in models.folder().iterdir() if f.is_file()}
    wanted = set()
    for package in setup.packages():
        files = (file.name for file in folder_of(package).iterdir() if file.is_file())
        other = OTHERS.get(folder_of(package).name, ())
        wanted |= {f"{package.replace('.', '/')}/{name}" for name in files if name not in other}
    assert names(ours) == wanted
    assert ours.stat().st_size <= LIMIT


def test_the_wheels_find_each_other_and_one_alone_says_what_to_install(
    wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    folders = [tmp_path / wheel.name.partition("-")[0] for wheel in wheels]
    for wheel, folder in zip(wheels, folders, strict=True):
        zipfile.ZipFile(wheel).extractall(folder)

    def call(*places: Path) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", FROM_WHEELS, *map(str, places)]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)

    both = call(*folders)
    assert both.returncode == 0, both.stderr
    sizes = [str(models.load(name).model.stat().st_size) for name in models.names()]
    assert both.stdout.split() == [*models.names(), *sizes]
    alone = call(folders[0])
    said = "the embedded models are not installed. Run: pip install 'onnxgrail[demo]'\n"
    assert (alone.returncode, alone.stdout, alone.stderr) == (1, said, f"Error: {said}")


def test_one_version() -> None:
    version = PROJECT["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert onnxgrail.__version__ == citation["version"] == MODELS["project"]["version"] == version
    assert PROJECT["project"]["optional-dependencies"]["demo"] == [f"onnxgrail-models=={version}"]
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_links_of_the_description_are_absolute(setup: ModuleType) -> None:
    text = setup.absolute((ROOT / "README.md").read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(link.startswith("https://") for link in links)
    ours = [re.sub(rf"{setup.HOME}/(blob|raw)/main/", "", link).split("#")[0] for link in links if setup.HOME in link]
    assert len(ours) > 10
    assert [path for path in ours if not (ROOT / path).exists()] == []


def test_workflows_run_what_there_is() -> None:
    names = [name.rsplit(" ", 1)[-1] for name in PROJECT["project"]["classifiers"] if ":: Python :: 3." in name]
    flows = {f.stem: yaml.safe_load(f.read_text(encoding="utf-8")) for f in (ROOT / ".github/workflows").glob("*.yml")}
    assert flows["test"]["jobs"]["wheel"]["strategy"]["matrix"]["python"] == names
    steps = [step for flow in flows.values() for job in flow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for command in commands:
        assert "make " not in command or command.removeprefix("make ") in targets
        assert "bash " not in command or (ROOT / command.removeprefix("bash ")).is_file()
