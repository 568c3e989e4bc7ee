"""How every application ends: what was wrong in one sentence, and the exit code that tells."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable

from forge_async.core.errors import ForgeError, one_sentence, unwrap

DONE, FAILED, INTERRUPTED = 0, 1, 130


def guarded_main(body: Callable[[], int]) -> int:
    """Run an application's body; errors become one sentence on standard error and an exit code.

    2: bad usage or configuration, 1: failed, 130: interrupted. FORGE_ASYNC_TRACEBACK=1 shows tracebacks too.
    """
    try:
        return body()
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost boundary
        show_traceback(error)
        print(one_sentence(error), file=sys.stderr)
        cause = unwrap(error)
        return cause.exit_code if isinstance(cause, ForgeError) else FAILED


def show_traceback(error: BaseException) -> None:
    """Print the traceback when the user asked for it by FORGE_ASYNC_TRACEBACK=1."""
    if os.environ.get("FORGE_ASYNC_TRACEBACK") == "1":
        traceback.print_exception(error)
