"""Print a package configuration for `olive run --package-config`: the passes of Olive, and `OnnxGrail`."""

from __future__ import annotations

import json
from pathlib import Path

from olive.package_config import OlivePackageConfig

EVERYWHERE = ("supported_providers", "supported_accelerators", "supported_precisions")

if __name__ == "__main__":
    config = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text(encoding="utf-8"))
    config["passes"]["OnnxGrail"] = {"module_path": "onnxgrail_olive.OnnxGrail", "dataset": "dataset_optional"}
    config["passes"]["OnnxGrail"] |= {key: ["*"] for key in EVERYWHERE}
    print(json.dumps(config, indent=2))
