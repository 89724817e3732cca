"""A plugin of pytest: tells why a test has failed as soon as it has, where a time limit may end the whole."""

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print an error with what led to it."""
    if report.failed:
        print(f"\nE at once: {report.nodeid}\n{report.longreprtext}", flush=True)
