"""The request service: an asyncio face on a synchronous engine.

One loop owns the engine. Each turn of the loop takes in what was asked for since the last one, applies queued commands
(a weight swap, a read-back, a cut) and advances the engine by one step, all on one thread of its own so that the event
loop stays free. Weights therefore change between steps, with requests in flight; what becomes of those is the swap
mode's matter (`swap.py`), and what happens on the thread is the driver's (`driver.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from forge_async.core.errors import ForgeError, PolicyError, RequestRefusedError, one_sentence
from forge_async.core.threads import to_thread_and_back
from forge_async.core.versions import PolicyVersion
from forge_async.policy.concurrency import UNLIMITED, ConcurrencyLimit
from forge_async.policy.driver import Driver, Progress, ServiceState, ServiceStats
from forge_async.policy.ports import Engine, GenerationRequest, GenerationResult
from forge_async.policy.swap import SwapRecord, swap_mode


@dataclass(slots=True)
class Ticket:
    """One submission: its requests finish one by one and are collected together."""

    remaining: int
    """Requests that are neither finished nor refused nor cut."""
    finished: list[GenerationResult] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    refused: list[RequestRefusedError] = field(default_factory=list)
    """One for each request that the engine cannot serve; told when all others were collected."""
    error: BaseException | None = None
    """Why nothing more will come."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """An unfinished request."""

    ticket: Ticket
    id: str
    """As its sender calls it."""
    given_tokens: int
    """Tokens of its prefix, which were made before it was sent."""


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to be done on the engine's thread between two steps."""

    run: Callable[[], Any]
    future: asyncio.Future[Any]


LONGEST_TURN_S = 60.0
"""How long a swap that was called off waits for the turn of the engine's thread that has begun it: one that takes
longer hangs, and the deadline of whoever asked the replica has passed."""


class RequestService:
    """Serves many callers from one engine. All methods are for one event loop."""

    def __init__(
        self, build_engine: Callable[[], Engine], *, swap: str = "keep_kv", limit: ConcurrencyLimit | None = None
    ) -> None:
        """`build_engine` runs on the engine's thread, since engines bind to the thread that made them.

        Args:
            swap: the swap mode, a name of `policy.swap.MODES`.
            limit: of the sequences that the engine holds at once; None: all that are asked for.
        """
        self._build, self._mode = build_engine, swap_mode(swap)
        self._limit = limit or ConcurrencyLimit(UNLIMITED, UNLIMITED)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._driver: Driver | None = None
        self._inbox: list[GenerationRequest] = []
        self._commands: list[_Command] = []
        self._answering: list[_Command] = []
        """Commands of the turn that the engine's thread is at."""
        self._turn: asyncio.Future[tuple[list[_Answer], Progress]]
        """That turn, or the last one."""
        self._entries: dict[str, _Entry] = {}
        """Unfinished requests by the ids that the engine knows them by."""
        self._numbers = itertools.count()
        self._runnable = False
        self._wake = asyncio.Event()
        self._ready = asyncio.Event()
        """Set while a swap need not wait for requests in flight, and when there will be none."""
        self._swapping = asyncio.Lock()
        self._loop_task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    async def start(self) -> None:
        """Build the engine and begin serving."""
        engine = await asyncio.get_running_loop().run_in_executor(self._thread, self._build)
        self._driver = Driver(engine, self._mode, self._limit)
        self._loop_task = asyncio.create_task(self._serve(self._driver), name="request service")

    async def close(self) -> None:
        """Stop serving; unfinished submissions fail."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        self._fail(PolicyError("The policy's request service was closed while requests were in flight."))
        self._thread.shutdown(wait=False, cancel_futures=True)

    def submit(self, requests: Sequence[GenerationRequest]) -> Ticket:
        """Queue requests; they enter the engine together, in order, before its next step.

        Their ids need only differ from each other: the engine is given ids that no other request ever has, so that a
        new attempt never meets an old one that is still unfinished.
        """
        self._check_serving()
        seen: set[str] = set()
        for request in requests:
            if request.id in seen:
                raise PolicyError(
                    f"Two requests of one submission are called {request.id}; give each an id of its own."
                )
            seen.add(request.id)
        ticket = Ticket(remaining=len(requests))
        for request in requests:
            inner = dataclasses.replace(request, id=f"{request.id}~{next(self._numbers)}")
            given = 0 if request.prefix is None else len(request.prefix.token_ids)
            self._entries[inner.id] = _Entry(ticket, request.id, given)
            self._inbox.append(inner)
        self._wake.set()
        return ticket

    async def collect(self, ticket: Ticket, linger_s: float) -> tuple[list[GenerationResult], bool]:
        """Wait for at least one finished request, then up to `linger_s` seconds for more.

        Returns the results and whether the ticket is exhausted. Raises RequestRefusedError for requests that the
        engine refused, once all others were returned.
        """
        await self._changed(ticket, lambda: bool(ticket.finished) or not ticket.remaining)
        if ticket.remaining and linger_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(linger_s):
                    await self._changed(ticket, lambda: not ticket.remaining)
        if ticket.error is not None:
            raise ticket.error
        results, ticket.finished = ticket.finished, []
        if ticket.refused and not ticket.remaining and not results:
            raise ticket.refused[0]
        return results, not ticket.remaining and not ticket.refused

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Submit and wait for all, in the order of `requests`."""
        ticket, results = self.submit(requests), {}
        done = not requests
        while not done:
            finished, done = await self.collect(ticket, linger_s=3600.0)
            results.update({result.id: result for result in finished})
        return [results[request.id] for request in requests]

    async def cut(self, ticket: Ticket, ids: Sequence[str] | None = None) -> list[GenerationResult]:
        """End the unfinished requests of a ticket now.

        Args:
            ids: only these requests of it; None: all.

        Returns what was not yet collected of them: finished requests, and of the others finished rows whole and
        unfinished rows as far as they came, marked as cut.
        """
        self._check_serving()
        wanted = [
            inner
            for inner, entry in self._entries.items()
            if entry.ticket is ticket and (ids is None or entry.id in ids)
        ]
        driver = self._serving
        cut = [self._settle(result) for result in await self._command(lambda: driver.cut(wanted))]
        finished = [result for result in ticket.finished if ids is None or result.id in ids]
        ticket.finished = [result for result in ticket.finished if ids is not None and result.id not in ids]
        ticket.changed.set()
        return finished + [result for result in cut if result is not None]

    @contextlib.asynccontextmanager
    async def pulling(self) -> AsyncIterator[None]:
        """Around a pull and its swap, one at a time: generation comes to the stop that the swap mode asks for.

        However the pull ends, generation goes on afterwards, with whatever version the engine then has; but not where
        the check of its swap has failed.
        """
        async with self._swapping:
            driver = self._serving
            try:
                if self._mode.holds:
                    await self._command(driver.hold)
                yield
            finally:
                if self._mode.holds:
                    self._post(driver.release)

    async def prepare(self, weights: Mapping[str, Any], version: PolicyVersion) -> Mapping[str, Any]:
        """Bring weights into the form that the engine keeps them in, on a thread beside its steps; `swap` takes them.

        Raises WeightsError when they do not fit. Whoever is cancelled goes on when nobody reads the weights any more.
        """
        engine = self._serving.engine
        return await to_thread_and_back(engine.prepare, weights, version) if engine.sealed else weights

    async def swap(
        self, weights: Mapping[str, Any] | None, version: PolicyVersion, check: Callable[[Engine], None] | None = None
    ) -> SwapRecord:
        """Swap weights in, inside `pulling`, between two steps; a drain first waits for what is in flight, unless that
        can end with its own weights beside these.

        `check` looks at the engine after the load, on its thread. When it raises, the service ends: everyone who waits,
        and everyone who comes later, hears of it, and no token is made with these weights.

        The weights may be memory that is only lent: whoever is cancelled here goes on when nobody reads it any more.
        """
        driver = self._serving
        if self._mode.holds:
            await self._command(lambda: driver.make_way(weights))
            await self._ready.wait()
        return await self._command(lambda: driver.swap(weights, version, check), outlasts=True)

    async def between_steps(self, command: Callable[[Engine], Any]) -> Any:
        """Run `command(engine)` on the engine's thread between two steps and return what it returns."""
        engine = self._serving.engine
        return await self._command(lambda: command(engine))

    async def state(self) -> ServiceState:
        """How full service and engine are."""
        return await self._command(self._serving.state)

    def take_stats(self) -> ServiceStats:
        """Return the statistics since the last call and start anew."""
        if self._driver is None:
            return ServiceStats()
        stats, self._driver.stats = self._driver.stats, ServiceStats()
        return stats

    def fail(self, error: ForgeError) -> None:
        """End for good, because the engine cannot go on: all who wait, and all who come later, hear of it."""
        self._fail(error)

    def num_unfinished(self) -> int:
        """Requests submitted and not finished."""
        return len(self._entries)

    @property
    def _serving(self) -> Driver:
        self._check_serving()
        if self._driver is None:
            raise PolicyError("The request service was not started; await its start() first.")
        return self._driver

    def _check_serving(self) -> None:
        if self._error is not None:
            raise PolicyError(f"The policy serves no more: {self._error}") from self._error

    async def _changed(self, ticket: Ticket, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` holds; raises the ticket's error."""
        while not condition() and ticket.error is None:
            ticket.changed.clear()
            await ticket.changed.wait()
        if ticket.error is not None:
            raise ticket.error

    async def _command(self, run: Callable[[], Any], *, outlasts: bool = False) -> Any:
        """Have `run` called between two steps; with `outlasts`, a cancellation waits for its end if it has begun."""
        self._check_serving()
        answer = self._post(run)
        try:
            return await answer
        except asyncio.CancelledError:
            if outlasts and any(command.future is answer for command in self._answering):
                await asyncio.wait({self._turn}, timeout=LONGEST_TURN_S)
            raise

    def _post(self, run: Callable[[], Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._commands.append(_Command(run, future))
        self._wake.set()
        return future

    async def _serve(self, driver: Driver) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not (self._inbox or self._commands or self._runnable):
                    self._wake.clear()
                    await self._wake.wait()
                inbox, self._inbox = self._inbox, []
                self._answering, self._commands = self._commands, []
                self._turn = loop.run_in_executor(self._thread, _turn, driver, inbox, self._answering)
                self._deliver(*await self._turn)
                self._answering = []
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of the engine: every waiter must hear of it
            named = error if isinstance(error, ForgeError) else PolicyError(f"The engine failed: {one_sentence(error)}")
            self._fail(named)

    def _deliver(self, answers: list[_Answer], progress: Progress) -> None:
        self._runnable = progress.runnable
        if progress.ready:
            self._ready.set()
        else:
            self._ready.clear()
        for future, value, error in answers:
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)
        for result in progress.results:
            entry = self._entries.get(result.id)
            if entry is not None and (named := self._settle(result)) is not None:
                entry.ticket.finished.append(named)
        for inner, why in progress.refused.items():
            if entry := self._entries.pop(inner, None):
                entry.ticket.refused.append(RequestRefusedError(f"The engine refused request {entry.id}: {why}"))
                entry.ticket.remaining -= 1
                entry.ticket.changed.set()

    def _settle(self, result: GenerationResult) -> GenerationResult | None:
        """Close the books on a request; returns its result under the name that its sender gave it."""
        entry = self._entries.pop(result.id, None)
        if entry is None:
            return None
        if self._driver is not None:
            self._driver.stats.tokens += len(result.completions.token_ids) - entry.given_tokens
        entry.ticket.remaining -= 1
        entry.ticket.changed.set()
        return dataclasses.replace(result, id=entry.id)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        for entry in self._entries.values():
            entry.ticket.error = error
            entry.ticket.changed.set()
        for command in self._answering + self._commands:
            if not command.future.done():
                command.future.set_exception(error)
                command.future.exception()  # seen: a stop that nobody awaits must not be reported as forgotten
        self._inbox, self._answering, self._commands, self._entries = [], [], [], {}
        self._runnable = False
        self._ready.set()


_Answer = tuple[asyncio.Future[Any], Any, BaseException | None]


def _turn(driver: Driver, inbox: list[GenerationRequest], commands: list[_Command]) -> tuple[list[_Answer], Progress]:
    """One turn on the engine's thread: new requests, commands, one step."""
    driver.enqueue(inbox)
    version = driver.engine.version
    # A command whose sender gave up is not begun: a swap must not come after its pull was called off.
    answers = [_attempt(command) for command in commands if not command.future.done()]
    if driver.engine.version != version:
        driver.version_changed()
    return answers, driver.turn()


def _attempt(command: _Command) -> _Answer:
    """Run a command; its error belongs to whoever sent it, and the engine goes on."""
    try:
        return command.future, command.run(), None
    except Exception as error:  # noqa: BLE001 - handed to the sender, whose await raises it
        return command.future, None, error
