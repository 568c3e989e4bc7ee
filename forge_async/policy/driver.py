"""What happens on the engine's thread: its own queue, the swap, the cut, and one step after the other.

The driver is synchronous and knows neither asyncio nor callers: requests come with ids of their own, unique for ever.
It hands the engine what may run, takes requests with a prefix apart into plain ones, and stitches their rows together.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_async.core.errors import PolicyError, WeightsError
from forge_async.core.records import Completions
from forge_async.core.versions import PolicyVersion
from forge_async.policy.concurrency import UNLIMITED, ConcurrencyLimit
from forge_async.policy.ports import Engine, GenerationRequest, GenerationResult, Occupancy
from forge_async.policy.rows import Continuation, nothing_made, without_cut_rows
from forge_async.policy.swap import REBUILD, RESUME, RETRY, SwapMode, SwapRecord


@dataclass(slots=True)
class ServiceStats:
    """What the service did since it was last asked."""

    busy_s: float = 0.0
    """Seconds the engine thread spent taking in requests and in steps."""
    steps: int = 0
    tokens: int = 0
    """Tokens of completions that were finished or cut, as far as they were made here."""
    swaps: list[tuple[int, float]] = field(default_factory=list)
    """(step of the version, wall clock of the end of its first engine step) of each swap that has made tokens."""
    swap_records: list[SwapRecord] = field(default_factory=list)
    """What each swap cost."""
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    """(name, category, start, duration) in seconds of the wall clock, for the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """How full service and engine are now."""

    occupancy: Occupancy
    num_queued: int
    """Requests that wait outside the engine."""
    limit_sequences: int
    """The most sequences that the engine is given at once; 0: all."""


@dataclass(slots=True)
class Progress:
    """What came of one turn of the engine's thread."""

    results: list[GenerationResult] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Why a request cannot be served, by id."""
    runnable: bool = False
    """Whether another turn would get on without anybody asking for something."""
    ready: bool = False
    """Whether nothing is left that a swap must wait for, in a mode that has it wait."""


class Driver:
    """Drives one engine. All methods are for the engine's thread."""

    def __init__(self, engine: Engine, mode: SwapMode, limit: ConcurrencyLimit) -> None:
        self.engine, self.stats = engine, ServiceStats()
        self._mode, self._limit = mode, limit
        self._queue: deque[GenerationRequest] = deque()
        self._inside: dict[str, GenerationRequest] = {}
        """Requests whose sequences the engine holds, as they were when they entered."""
        self._continued: dict[str, Continuation] = {}
        """Those among them that were taken apart."""
        self._done: Progress = Progress()
        """What is to be told at the end of the turn."""
        self._admitting = self._stepping = True
        """Whether requests may enter and whether the engine may step."""
        self._stopped_at: float | None = None
        """When generation came to its stop for a pull."""
        self._beside = False
        """Whether the version that was pulled will be loaded beside those that requests in flight go on with."""
        self._unproven: int | None = None
        """Step of a version that was swapped in and has made no token yet."""
        self._num_preemptions = 0
        self._unfit: Exception | None = None
        """Why the engine must make no token any more: what it was loaded with did not stand the check."""

    @property
    def _holding(self) -> bool:
        return not (self._admitting and self._stepping)

    def hold(self) -> None:
        """Begin the stop that the mode asks for; a drain is over when the engine is empty.

        An engine that holds several versions needs no drain, unless what is pulled turns out to be weights that cannot
        stand beside others: `make_way` sees to it.
        """
        if not (self._mode.drains and self.engine.versions_held > 1):
            self._hold()

    def make_way(self, weights: Mapping[str, Any] | None) -> None:
        """These weights were pulled: begin what they still have to wait for."""
        self._beside = self._mode.drains and self.engine.keeps_apart(weights)
        if not self._beside:
            self._hold()

    def release(self) -> None:
        """End the stop."""
        self._admitting = self._stepping = True
        self._stopped_at, self._beside = None, False

    def _hold(self) -> None:
        self._admitting, self._stepping = self._mode.admits_while_pulling, self._mode.steps_while_pulling

    def enqueue(self, requests: Iterable[GenerationRequest]) -> None:
        """Take requests in, in order; they enter the engine as soon as they may, urgent ones before the others."""
        arrived = list(requests)
        if any(request.urgent for request in arrived):
            self._queue = deque(sorted([*self._queue, *arrived], key=lambda request: not request.urgent))
        else:
            self._queue.extend(arrived)

    def version_changed(self) -> None:
        """Weights were loaded: watch for the first tokens that they make."""
        self._unproven = self.engine.version.step

    def turn(self) -> Progress:
        """Hand requests over and advance the engine by one step, if it has something to do and may.

        Raises, now and for ever, what the check of a swap raised: it is the end of this replica (Law 5).
        """
        if self._unfit is not None:
            raise self._unfit
        wall, start = time.time(), time.perf_counter()
        self._admit()
        if self._stepping and self.engine.num_unfinished():
            for result in self.engine.step():
                self._finish(result)
            self._observe()
            self._note_step(wall, time.perf_counter() - start)
        busy = self._stepping and self.engine.num_unfinished() > 0
        if self._holding and not busy and self._stopped_at is None:
            self._stopped_at = time.perf_counter()
        done, self._done = self._done, Progress()
        done.ready = self._stopped_at is not None or (self._beside and self.engine.has_room())
        done.runnable = busy or bool(self._admitting and self._queue)
        return done

    def cut(self, ids: Sequence[str]) -> list[GenerationResult]:
        """End requests now; returns what they have made, for those of `ids` that are not finished."""
        wanted = set(ids)
        queued = [request for request in self._queue if request.id in wanted]
        self._queue = deque(request for request in self._queue if request.id not in wanted)
        return [nothing_made(request) for request in queued] + self._cut_inside(wanted)

    def swap(
        self, weights: Mapping[str, Any] | None, version: PolicyVersion, check: Callable[[Engine], None] | None = None
    ) -> SwapRecord:
        """Load a version, then deal with the requests in flight as the mode says.

        `check` looks at the engine after the load and may raise; then no turn is taken any more, whoever catches it. A
        load that raises leaves requests as they are. Raises WeightsError, before anything is done, for a version older
        than the one that is served (Law 4).
        """
        if version.precedes(self.engine.version):
            raise WeightsError(
                f"{version} is older than {self.engine.version}, which is served, and weights never go back; publish "
                "them under a new incarnation."
            )
        begun = time.perf_counter() if self._stopped_at is None else self._stopped_at
        occupancy, mode = self.engine.occupancy(), self._mode
        recomputed = 0
        if self._beside and weights is not None:
            self.engine.load_beside(weights, version)
        else:
            recomputed = self.engine.load(weights, version, keep_kv=mode.in_flight != REBUILD)
        if check is not None:
            self._prove(check)
        self.version_changed()
        discarded = 0
        if mode.in_flight in (RESUME, RETRY):
            discarded, recomputed = self._resubmit(keep_tokens=mode.in_flight == RESUME)
        record = SwapRecord(
            mode=mode.name,
            pause_s=time.perf_counter() - begun,
            num_in_flight=occupancy.num_running + occupancy.num_waiting,
            discarded_tokens=discarded,
            recomputed_tokens=recomputed,
        )
        self.stats.swap_records.append(record)
        return record

    def state(self) -> ServiceState:
        """How full service and engine are now."""
        limit = self._limit.num_sequences
        return ServiceState(
            occupancy=self.engine.occupancy(),
            num_queued=len(self._queue),
            limit_sequences=0 if limit >= UNLIMITED else limit,
        )

    def _prove(self, check: Callable[[Engine], None]) -> None:
        try:
            check(self.engine)
        except Exception as error:
            self._unfit = error
            raise

    def _admit(self) -> None:
        """Hand over queued requests in order, as many as the limit allows; one alone always fits."""
        if not (self._queue and self._admitting):
            return
        room = self._room()
        requests: list[GenerationRequest] = []
        while self._queue:
            size = _num_sequences(self._queue[0])
            if size > room and (self._inside or requests):
                break
            room -= size
            request = self._queue.popleft()
            requests += self._plain(request)
        for id, why in self.engine.add(requests).items():
            self._refuse(id, why)

    def _room(self) -> int:
        if self._limit.num_sequences >= UNLIMITED:
            return UNLIMITED
        occupancy = self.engine.occupancy()
        return self._limit.num_sequences - occupancy.num_running - occupancy.num_waiting

    def _plain(self, request: GenerationRequest) -> Iterable[GenerationRequest]:
        """What the engine is given for a request."""
        if request.prefix is None:
            self._inside[request.id] = request
            return [request]
        try:
            continued = Continuation(request)
        except PolicyError as error:
            self._done.refused[request.id] = str(error)
            return []
        if continued.done:
            self._done.results.append(continued.result())
            return []
        self._inside[request.id], self._continued[request.id] = request, continued
        return list(continued.parts.values())

    def _refuse(self, id: str, why: str) -> None:
        """A request or a part of one was not enqueued: the whole request ends."""
        whole = self._whole(id)
        if self._inside.pop(whole, None) is None:
            return
        if continued := self._continued.pop(whole, None):
            self.engine.cut(continued.parts)
        self._done.refused[whole] = why

    def _finish(self, result: GenerationResult) -> None:
        whole = self._whole(result.id)
        if continued := self._continued.get(whole):
            continued.add(result)
            if not continued.done:
                return
            del self._continued[whole]
            result = continued.result()
        if self._inside.pop(whole, None) is not None:
            self._done.results.append(result)

    def _whole(self, id: str) -> str:
        """The request that an id of the engine belongs to."""
        return id if id in self._inside else id.rpartition("#")[0]

    def _cut_inside(self, wanted: Iterable[str]) -> list[GenerationResult]:
        """What requests in the engine have made until now; it forgets them."""
        ids = [id for id in self._inside if id in wanted]
        parts = [part for id in ids for part in (self._continued[id].parts if id in self._continued else (id,))]
        made = {result.id: result for result in self.engine.cut(parts)}
        results: list[GenerationResult] = []
        for id in ids:
            if continued := self._continued.pop(id, None):
                for part in list(continued.parts):
                    continued.add(made[part])
                made[id] = continued.result()
            del self._inside[id]
            results.append(made[id])
        return results

    def _resubmit(self, keep_tokens: bool) -> tuple[int, int]:
        """Abort all that is in the engine and submit it again, before whatever waits; returns the tokens that were
        thrown away and those whose KV must be computed again."""
        originals = dict(self._inside)
        discarded = recomputed = 0
        again: list[GenerationRequest] = []
        for result in self._cut_inside(originals):
            request, made = originals[result.id], result.completions
            num_cut, num_lost = int(made.cut.sum()), _tokens_of_cut_rows(made)
            recomputed += num_cut * len(request.prompt_token_ids) + (num_lost if keep_tokens else 0)
            discarded += 0 if keep_tokens else num_lost
            again.append(_going_on(request, made if keep_tokens else without_cut_rows(made)))
        self._queue.extendleft(reversed(again))
        self._admit()
        return discarded, recomputed

    def _observe(self) -> None:
        if not self._limit.moves:
            return
        occupancy = self.engine.occupancy()
        preempted, self._num_preemptions = occupancy.num_preemptions - self._num_preemptions, occupancy.num_preemptions
        self._limit.observe(occupancy, num_preempted=preempted, num_queued=len(self._queue))

    def _note_step(self, wall: float, duration: float) -> None:
        """Count a step, and join it to the running span when less than 2 ms lie between: the trace stays small."""
        stats, spans = self.stats, self.stats.spans
        stats.busy_s += duration
        stats.steps += 1
        if self._unproven is not None:
            stats.swaps.append((self._unproven, wall + duration))
            self._unproven = None
        if spans and wall - (spans[-1][2] + spans[-1][3]) < 0.002:
            name, category, begun, _ = spans[-1]
            spans[-1] = (name, category, begun, wall + duration - begun)
        else:
            spans.append(("generate", "work", wall, duration))


def _num_sequences(request: GenerationRequest) -> int:
    return request.num_samples if request.prefix is None else int(request.prefix.cut.sum())


def _going_on(request: GenerationRequest, made: Completions) -> GenerationRequest:
    """The request with what it has made; a plain one when that is nothing."""
    nothing = made.cut.all() and not len(made.token_ids)
    return dataclasses.replace(request, prefix=None if nothing else made)


def _tokens_of_cut_rows(completions: Completions) -> int:
    return int(completions.lengths[completions.cut].sum())
