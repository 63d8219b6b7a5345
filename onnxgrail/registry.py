"""Everything that is added by one file and one line: the line stands here.

An entry is written as in the entry points of a package, `module:object`, without the leading `onnxgrail.`. It is
imported when it is first used, so that `--help` shows all names and imports nothing. A class is created without
arguments.
"""

from __future__ import annotations

import importlib
from collections import UserDict
from typing import Any


def is_ours(thing: Any) -> bool:
    """Return True if an object's class, or a function, is of onnxgrail itself, not of a program or another package."""
    return module_of(thing).startswith(f"{__name__.partition('.')[0]}.")


def module_of(thing: Any) -> str:
    """Return the name of the module of a function or a class, or of an object's class."""
    return str(getattr(thing, "__module__", None) or type(thing).__module__)


class Registry(UserDict[str, Any]):
    """Objects by name. A program can add its own, as in `SELECTORS["mine"] = Mine()`."""

    def __getitem__(self, name: str) -> Any:
        """Return the object of a name, imported if it has not been used before."""
        entry = self.data[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            found = getattr(importlib.import_module(f"onnxgrail.{module}"), attribute)
            entry = self.data[name] = found() if isinstance(found, type) else found
        return entry


SELECTORS = Registry(
    {
        "auto": "algebra.select.selectors.auto:Auto",
        "wanda": "algebra.select.selectors.wanda:Wanda",
        "wandapp": "algebra.select.selectors.wandapp:Wandapp",
        "l1": "algebra.select.selectors.l1:L1",
        "l2": "algebra.select.selectors.l2:L2",
        "flap": "algebra.select.selectors.flap:Flap",
        "gram": "algebra.select.selectors.gram:Gram",
        "obs": "algebra.select.selectors.obs:Obs",
        "slimgpt": "algebra.select.selectors.slimgpt:SlimGpt",
        "random": "algebra.select.selectors.random:Random",
    }
)
"""Selectors: which units of a block stay."""

REDUCERS = Registry(
    {
        "prune": "algebra.reducers.prune:Prune",
        "fold": "algebra.reducers.fold:Fold",
        "fold-kmeans": "algebra.reducers.fold:KMEANS",
        "fold-gram": "algebra.reducers.fold_gram:FoldGram",
        "fold-random": "algebra.reducers.fold_random:FoldRandom",
    }
)
"""Reducers: how the units of a block become fewer."""

COMPENSATORS = Registry(
    {
        "grail": "algebra.fit.compensate.grail:Grail",
        "best": "algebra.fit.compensate.grail:Grail",
        "none": "algebra.fit.compensate.plain:Plain",
    }
)
"""Compensators: the new weights of a block. With `best`, GRAIL is for blocks that cannot be fitted to the outputs."""

REFINEMENTS = Registry(
    {
        "laco": "methods.refine.laco:laco",
        "distill": "methods.refine.distill:distill",
        "norms": "methods.refine.tuned_norms:norms",
        "ic": "methods.refine.ic:ic",
    }
)
"""Refinements: how gradients fit the whole narrowed model to the dense one."""

DATA_KINDS = Registry(
    {
        "file.py:function": "calibration.feeds.kinds.feeds:FUNCTION",
        ".npz": "calibration.feeds.kinds.arrays:NPZ",
        ".npy": "calibration.feeds.kinds.arrays:NPY",
        "Polygraphy .json": "calibration.feeds.kinds.feeds:POLYGRAPHY",
        ".jsonl": "calibration.feeds.kinds.tables:LINES",
        ".parquet": "calibration.feeds.kinds.tables:PARQUET",
        ".txt": "calibration.feeds.kinds.text:LINES",
        "test_data_set_* folders (.pb)": "calibration.feeds.kinds.feeds:PROTOBUFS",
        "a saved Hugging Face dataset": "calibration.feeds.kinds.datasets:DATASET",
        "a folder of .npz or .npy": "calibration.feeds.kinds.arrays:FOLDER",
        "a folder of images": "calibration.feeds.kinds.images:IMAGES",
    }
)
"""Kinds of calibration data. The first one that matches a path reads it, so the order decides for a mixed folder."""

*_FIRST, _LAST = DATA_KINDS
MENU = f"{', '.join(_FIRST)} or {_LAST}"
"""The kinds of calibration data in a sentence."""

REPORT_SECTIONS = Registry(
    {
        "notes": "report.page.results:notes",
        "sizes": "report.page.results:sizes",
        "fidelity": "report.page.outputs:fidelity",
        "latency": "report.page.results:latency",
        "network": "report.page.blockmap:narrowed_map",
        "sensitivity": "report.page.sensitivity:sensitivity",
        "repairs": "report.page.results:repairs",
        "lowrank": "report.page.deployment:low_rank",
        "deployment": "report.page.deployment:deployment",
        "refusals": "report.page.results:left_alone",
        "time": "report.page.results:time",
        "again": "report.page.command:again",
    }
)
"""Sections of an HTML report, in the order of the page."""
INSPECTION_SECTIONS = Registry(
    {
        "notes": "report.page.results:notes",
        "predicted": "report.page.results:predicted",
        "network": "report.page.blockmap:dense_map",
        "refusals": "report.page.results:left_alone",
    }
)
"""Sections of the page of an inspection."""
