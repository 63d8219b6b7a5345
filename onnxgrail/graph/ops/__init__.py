"""Rules for how channels pass through each op: one file per op family in `layers` and `tensors`.

Importing this package imports all of these files and so registers their rules.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
