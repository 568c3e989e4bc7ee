"""Who waits for what, and for how long: a wait that takes too long is told by name, then ends the run (Law 6).

The loops say what they wait for; the watchdog looks at the clock. Deadlines of single calls are shorter and more
exact where there are any; this is the net below them, and the one place that knows the whole picture.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forge_async.core.clock import Clock, SystemClock
from forge_async.core.errors import ForgeError, StallError

LOOK_EVERY_S = 1.0
"""Between two looks at the clock."""
EXPLAIN_DEADLINE_S = 5.0
"""How long the explanation of a stall may take; it comes from a process that may be what stalls."""


@dataclass(slots=True, kw_only=True, eq=False)
class Wait:
    """Something that a loop waits for now."""

    who: str
    what: str
    """What is waited for, such as `the batch of step 12`."""
    whom: str
    """Who should bring it."""
    since_s: float
    """On the watchdog's clock."""
    limit_s: float | None
    """After so long it is a stall; None: waiting is this loop's right, and shown only beside another's stall."""
    told_s: float = 0.0
    """How long it had lasted when it was last told; 0: never."""

    def sentence(self, now_s: float) -> str:
        """Without full stop."""
        return f"{self.who} has waited {now_s - self.since_s:.0f} s for {self.what} from {self.whom}"


async def _no_explanation() -> str:
    return ""


class Watchdog:
    """Knows every wait of the run's loops."""

    def __init__(
        self,
        *,
        warn_after_s: float = 60.0,
        clock: Clock | None = None,
        warn: Callable[[str], None] = lambda text: None,
        explain: Callable[[], Awaitable[str]] = _no_explanation,
    ) -> None:
        """Args:
        warn_after_s: a wait with a limit is told after so many seconds, and again each time its length has doubled.
        clock: what measures waits.
        warn: takes the warning, one line.
        explain: says what the replay actor lacks, asked when there is something to tell.
        """
        self._warn_after_s, self._clock = warn_after_s, clock or SystemClock()
        self._warn, self._explain = warn, explain
        self._waits: list[Wait] = []

    @contextmanager
    def waiting(self, who: str, what: str, whom: str, limit_s: float | None = None) -> Iterator[None]:
        """Declare a wait for the time of the `with` block."""
        wait = Wait(who=who, what=what, whom=whom, since_s=self._clock.now_s(), limit_s=limit_s)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    async def run(self) -> None:
        """Look again and again; ends only by cancellation, or with a StallError that names every wait."""
        while True:
            await self._clock.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Look once: warn of what takes long, raise StallError for what takes too long."""
        now_s = self._clock.now_s()
        for wait in [wait for wait in self._waits if wait.limit_s is not None]:
            lasted_s = now_s - wait.since_s
            if lasted_s >= (wait.limit_s or 0.0):
                raise StallError(await self._picture(wait))
            if lasted_s >= max(self._warn_after_s, 2 * wait.told_s):
                wait.told_s = lasted_s
                self._warn(await self._picture(wait))

    async def _picture(self, wait: Wait) -> str:
        """The wait, what the replay actor lacks, and what the other loops wait for."""
        now_s = self._clock.now_s()
        cause = await self._cause()
        others = "; ".join(other.sentence(now_s) for other in self._waits if other is not wait)
        parts = [wait.sentence(now_s), *([cause] if cause else []), *([f"meanwhile {others}"] if others else [])]
        return "; ".join(parts) + "."

    async def _cause(self) -> str:
        try:
            return await asyncio.wait_for(self._explain(), EXPLAIN_DEADLINE_S)
        except TimeoutError:
            return f"the replay actor did not say why within {EXPLAIN_DEADLINE_S:g} s"
        except ForgeError as error:
            return f"the replay actor could not be asked why ({error})"
