"""A summary at the end of the whole run: how many tests were skipped, and for which reason."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# What the oldest releases that are allowed cannot do themselves (`make oldest`), most of it in ONNX Runtime 1.26.
TOO_NEW = (
    "test_again.py::test_a_narrowed_model_narrows[com.microsoft.ExpandDims]",
    "test_branched.py::test_weights_in_nodes_of_the_branch_that_all_data_take_get_fewer_bits",
    "test_elsewhere.py::test_main_commands_need_no_linux",  # NumPy 1 asks Linux for its name
    "test_folding.py::test_ward_is_that_of_scipy[30]",
    "test_hard_times.py::test_a_full_disk_leaves_nothing_half_written",  # NumPy 1 leaves an archive half open
    "test_naive.py::test_the_numpy_nets_are_the_onnx_nets[padded]",
    "test_naive.py::test_the_numpy_nets_are_the_onnx_nets[transformer]",
    "test_quantised.py::test_biases_follow_scales_that_grew[True-Gemm<transB=1>]",
    "test_rounding.py::test_a_tied_table_is_stored_once[pack_table-4-64-False]",
    "test_rounding.py::test_the_last_block_of_a_table_may_be_shorter[4-72-zero-points]",
    "test_rounding.py::test_the_last_block_of_a_table_may_be_shorter[4-88-zero-points]",
    "test_rules.py::test_rule[com.microsoft.ExpandDims]",
    "test_rules.py::test_rule[com.microsoft.QMoE-blocks-refused]",
)

# A busy machine must not fail a test.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the number of skipped tests per reason; `-rs` would print a line per place."""
    reports = terminalreporter.getreports("skipped")
    reasons = Counter(reason_of(report.longrepr) for report in reports)
    if not reasons:
        return
    terminalreporter.section("skipped, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5d}  {reason}")


def reason_of(longrepr: Any) -> str:
    """Return why a test was skipped, without the place."""
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    reason = text.removeprefix("Skipped: ")
    missing = re.match("could not import '([^']*)'", reason)
    return f"{missing[1]} is not installed" if missing else reason


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the installed releases are too old for."""
    for item in items if _is_old() else ():
        if item.nodeid.endswith(TOO_NEW):
            item.add_marker(pytest.mark.skip(reason="needs newer releases"))


def _is_old() -> bool:
    try:
        from onnxruntime import __version__ as release
    except ImportError:
        return False
    return tuple(map(int, release.split(".")[:2])) < (1, 29)


def pytest_collection_finish() -> None:
    """Take the tests themselves out of garbage collection, which commands ask for and which would pass over them."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Keep no times: neither in the user's folder, nor from one test to the next."""
    os.environ["ONNXGRAIL_CACHE"] = ""
