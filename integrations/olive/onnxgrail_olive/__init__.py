"""The pass `OnnxGrail` of Olive: prune an ONNX model and repair it on calibration data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from olive.data.config import DataConfig
from olive.exception import OlivePassError
from olive.hardware.accelerator import AcceleratorSpec
from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.passes import Pass
from olive.passes.onnx.common import get_external_data_file_names
from olive.passes.pass_config import BasePassConfig, PassConfigParam

import onnxgrail

__all__ = ["OnnxGrail"]

Feed = dict[str, Any]


class OnnxGrail(Pass):
    """Prune channels, neurons and heads, and refit the remaining weights on calibration data, with onnxgrail."""

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "ratio": PassConfigParam(type_=float, default_value=None, description="Share of the parameters to remove."),
            "max_loss": PassConfigParam(
                type_=float, default_value=None, description="Largest loss, as a share; instead of ratio."
            ),
            "data": PassConfigParam(
                type_=str, default_value=None, description="Path of calibration data, in any format of onnxgrail."
            ),
            "data_config": PassConfigParam(
                type_=DataConfig | dict, default_value=None, description="Calibration data of Olive; instead of data."
            ),
            "options": PassConfigParam(
                type_=dict, default_value=None, description="Other options of onnxgrail.compress, by name."
            ),
        }

    def _run_for_config(
        self, model: ONNXModelHandler, config: type[BasePassConfig], output_model_path: str
    ) -> ONNXModelHandler:
        output = Path(resolve_onnx_path(output_model_path, Path(model.model_path).name))
        given: Any = config
        amount = {name: value for name in ("ratio", "max_loss") if (value := getattr(given, name)) is not None}
        data = given.data if given.data_config is None else _feeds(given.data_config, model)
        try:
            result = onnxgrail.compress(
                model.model_path, output, data=data, force=True, **amount, **(given.options or {})
            )
        except onnxgrail.NothingToCompressError as error:
            raise OlivePassError(str(error)) from error
        if not result.gates_passed:
            raise OlivePassError(f"a gate failed: {result.report.headline()}")
        if get_external_data_file_names(output):
            return ONNXModelHandler(model_path=output.parent, onnx_file_name=output.name)
        return ONNXModelHandler(model_path=output)


def _feeds(data_config: Any, model: ONNXModelHandler) -> Iterator[Feed]:
    """Yield the calibration feeds that Olive's own quantization would read."""
    chosen = data_config if isinstance(data_config, DataConfig) else DataConfig.model_validate(data_config)
    reader = chosen.to_data_container().create_calibration_dataloader(
        model_path=model.model_path, io_config=model.io_config
    )
    while (feed := reader.get_next()) is not None:
        yield feed
