"""Write to the package what pyproject.toml cannot say: its folders, and a description whose links work elsewhere."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HOME = "https://github.com/onnxgrail/onnxgrail"
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def absolute(text: str) -> str:
    """Return Markdown whose links to files of the repository lead to its home; pictures are linked as raw files."""

    def link(found: re.Match[str]) -> str:
        view = "raw" if found[1].endswith((".svg", ".png")) else "blob"
        return f"]({HOME}/{view}/main/{found[1]})"

    return LINK.sub(link, text)


def packages() -> list[str]:
    """Return all packages: `cli/` and `models/` stand beside `onnxgrail/` and install inside it.

    `models/data/` is the distribution of `models/pyproject.toml`.
    """
    beside = find_packages(include=["cli", "cli.*", "models", "models.*"], exclude=["models.data"])
    return find_packages(include=["onnxgrail", "onnxgrail.*"]) + [f"onnxgrail.{name}" for name in beside]


if __name__ == "__main__":
    setup(
        packages=packages(),
        long_description=absolute(Path("README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
