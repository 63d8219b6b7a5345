"""A summary at the end of the whole run: how many tests were skipped, and for which reason."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings

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


def pytest_collection_finish() -> None:
    """Take the tests themselves out of garbage collection, which commands ask for and which would pass over them."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Keep no times: neither in the user's folder, nor from one test to the next."""
    os.environ["ONNXGRAIL_CACHE"] = ""
