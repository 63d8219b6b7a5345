"""How channels pass through each op: a file per family in `layers` and `tensors`.

Importing this package imports, and so registers, them all.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
