"""Checks of a release: every folder and file of the package, one version, and a description whose links work."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import onnxgrail

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BESIDE = {"onnxgrail.cli": "cli", "onnxgrail.models": "models"}


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
    assert {folder_of(package) for package in setup.packages()} == {file.parent for file in sources}


def test_every_file_is_in_the_wheel(setup: ModuleType) -> None:
    stated = PROJECT["tool"]["setuptools"]["package-data"]
    for package in setup.packages():
        patterns = ["*.py", *stated.get(package, [])]
        files = [file for file in folder_of(package).iterdir() if file.is_file()]
        assert [f.name for f in files if not any(fnmatch(f.name, one) for one in patterns)] == [], package


def test_one_version() -> None:
    version = PROJECT["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert onnxgrail.__version__ == citation["version"] == version
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
