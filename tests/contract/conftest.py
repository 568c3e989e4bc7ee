"""Ends Monarch's client with the test session, so that the interpreter's exit is quiet."""

from __future__ import annotations

import contextlib
import sys


def pytest_sessionfinish():
    if "monarch.actor" in sys.modules:
        from monarch.actor import shutdown_context

        with contextlib.suppress(TimeoutError):
            shutdown_context(host_timeout=0.5).get(timeout=5)
