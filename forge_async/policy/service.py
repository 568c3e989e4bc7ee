"""The request service: an asyncio face on a synchronous engine.

One loop owns the engine. Each turn of the loop applies queued commands (a weight swap, a read-back), hands waiting
requests to the engine in the order of their arrival, and advances it by one step, all on one thread of its own so
that the event loop stays free. Weights therefore change between steps, with requests in flight, and nothing stops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from forge_async.core.errors import ForgeError, PolicyError, one_sentence
from forge_async.policy.ports import Engine, GenerationRequest, GenerationResult


@dataclass(slots=True)
class ServiceStats:
    """What the service did since it was last asked."""

    busy_s: float = 0.0
    """Seconds the engine thread spent taking in requests and in steps."""
    steps: int = 0
    tokens: int = 0
    """Tokens of finished completions."""
    swaps: list[tuple[int, float]] = field(default_factory=list)
    """(step of the version, wall clock of the end of its first engine step) of each swap that has made tokens."""
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    """(name, category, start, duration) in seconds of the wall clock, for the trace."""


@dataclass(slots=True)
class Ticket:
    """One submission: its requests finish one by one and are collected together."""

    remaining: int
    finished: list[GenerationResult] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: BaseException | None = None


class RequestService:
    """Serves many callers from one engine. All methods are for one event loop."""

    def __init__(self, build_engine: Callable[[], Engine]) -> None:
        """`build_engine` runs on the engine's thread, since engines bind to the thread that made them."""
        self._build = build_engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._engine: Engine | None = None
        self._inbox: list[tuple[Ticket, Sequence[GenerationRequest]]] = []
        self._commands: list[tuple[Callable[[Engine], Any], asyncio.Future[Any]]] = []
        self._answering: list[tuple[Callable[[Engine], Any], asyncio.Future[Any]]] = []
        """Commands of the turn that the engine's thread is at."""
        self._tickets: dict[str, Ticket] = {}
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._stats = ServiceStats()
        self._error: BaseException | None = None
        self._unproven: int | None = None
        """Step of a version that was swapped in and has made no token yet."""

    async def start(self) -> None:
        """Build the engine and begin serving."""
        self._engine = await asyncio.get_running_loop().run_in_executor(self._thread, self._build)
        self._loop_task = asyncio.create_task(self._serve(), name="request service")

    async def close(self) -> None:
        """Stop serving; unfinished submissions fail."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        self._fail(PolicyError("The policy's request service was closed while requests were in flight."))
        self._thread.shutdown(wait=False, cancel_futures=True)

    def submit(self, requests: Sequence[GenerationRequest]) -> Ticket:
        """Queue requests; they enter the engine together, in order, before its next step."""
        self._check_serving()
        for request in requests:
            if request.id in self._tickets:
                raise PolicyError(f"Request {request.id} is still unfinished; give a new one an id of its own.")
        ticket = Ticket(remaining=len(requests))
        self._tickets.update({request.id: ticket for request in requests})
        self._inbox.append((ticket, requests))
        self._wake.set()
        return ticket

    async def collect(self, ticket: Ticket, linger_s: float) -> tuple[list[GenerationResult], bool]:
        """Wait for at least one finished request, then up to `linger_s` seconds for more.

        Returns the results and whether the ticket is exhausted.
        """
        await self._wait(ticket)
        if ticket.remaining and linger_s > 0:
            try:
                async with asyncio.timeout(linger_s):
                    while ticket.remaining and ticket.error is None:
                        ticket.changed.clear()
                        await ticket.changed.wait()
            except TimeoutError:
                pass
        if ticket.error is not None:
            raise ticket.error
        results, ticket.finished = ticket.finished, []
        return results, ticket.remaining == 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Submit and wait for all, in the order of `requests`."""
        ticket, results = self.submit(requests), {}
        done = not requests
        while not done:
            finished, done = await self.collect(ticket, linger_s=3600.0)
            results.update({result.id: result for result in finished})
        return [results[request.id] for request in requests]

    async def between_steps(self, command: Callable[[Engine], Any]) -> Any:
        """Run `command(engine)` on the engine's thread between two steps and return what it returns."""
        self._check_serving()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._commands.append((command, future))
        self._wake.set()
        return await future

    def take_stats(self) -> ServiceStats:
        """Return the statistics since the last call and start anew."""
        stats, self._stats = self._stats, ServiceStats()
        return stats

    def num_unfinished(self) -> int:
        """Requests submitted and not finished."""
        return len(self._tickets)

    def _check_serving(self) -> None:
        if self._error is not None:
            raise PolicyError(f"The policy serves no more: {self._error}") from self._error

    async def _wait(self, ticket: Ticket) -> None:
        while not ticket.finished and ticket.remaining and ticket.error is None:
            ticket.changed.clear()
            await ticket.changed.wait()
        if ticket.error is not None:
            raise ticket.error

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not (self._inbox or self._commands or self._tickets):
                    self._wake.clear()
                    await self._wake.wait()
                inbox, self._inbox = self._inbox, []
                self._answering, self._commands = self._commands, []
                answers, results = await loop.run_in_executor(
                    self._thread, self._turn, [r for _, requests in inbox for r in requests], self._answering
                )
                self._deliver(answers, results)
                self._answering = []
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of the engine: every waiter must hear of it
            named = error if isinstance(error, ForgeError) else PolicyError(f"The engine failed: {one_sentence(error)}")
            self._fail(named)

    def _turn(self, requests: list[GenerationRequest], commands: list) -> tuple[list, list[GenerationResult]]:
        """One turn on the engine's thread: commands, new requests, one step."""
        assert self._engine is not None
        before = self._engine.version
        answers = [(future, *_attempt(command, self._engine)) for command, future in commands]
        if self._engine.version != before:
            self._unproven = self._engine.version.step
        wall, start = time.time(), time.perf_counter()
        if requests:
            self._engine.add(requests)
        if not self._engine.num_unfinished():
            return answers, []
        results = self._engine.step()
        duration = time.perf_counter() - start
        self._stats.busy_s += duration
        self._stats.steps += 1
        if self._unproven is not None:
            self._stats.swaps.append((self._unproven, wall + duration))
            self._unproven = None
        self._note_span(wall, duration)
        return answers, results

    def _note_span(self, wall: float, duration: float) -> None:
        """Join a step to the running span when less than 2 ms lie between, so that the trace stays small."""
        spans = self._stats.spans
        if spans and wall - (spans[-1][2] + spans[-1][3]) < 0.002:
            name, category, begun, _ = spans[-1]
            spans[-1] = (name, category, begun, wall + duration - begun)
        else:
            spans.append(("generate", "work", wall, duration))

    def _deliver(self, answers: list, results: list[GenerationResult]) -> None:
        for future, value, error in answers:
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)
        for result in results:
            ticket = self._tickets.pop(result.id, None)
            if ticket is None:
                continue
            self._stats.tokens += len(result.completions.token_ids)
            ticket.finished.append(result)
            ticket.remaining -= 1
            ticket.changed.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        waiting = [ticket for ticket, _ in self._inbox] + list(self._tickets.values())
        for ticket in waiting:
            ticket.error = error
            ticket.changed.set()
        for _, future in self._answering + self._commands:
            if not future.done():
                future.set_exception(error)
        self._inbox, self._answering, self._commands, self._tickets = [], [], [], {}


def _attempt(command: Callable[[Engine], Any], engine: Engine) -> tuple[Any, BaseException | None]:
    """Run a command; its error belongs to whoever sent it, and the engine goes on."""
    try:
        return command(engine), None
    except Exception as error:  # noqa: BLE001 - handed to the sender, whose await raises it
        return None, error
