"""The tokens of each completion as vLLM's engine core gives them, collected in place of vLLM's output processor.

Written against vLLM 0.32. Its own makes text, statistics, and for every token a dictionary of log-probabilities: 13% of
an engine of a small model. Here a token is a number, a log-probability is another, and the version that made them is
noted where it changes. An `LLMEngine` calls the methods that it would call of its own; what `step` returns are then
`Finished`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from forge_async.core.errors import PolicyError
from forge_async.policy.stop_strings import StopWatcher

STOP, LENGTH, ABORT = "stop", "length", "abort"
"""Why a completion ended, of vLLM's reasons: a stop token or string, the token limit, or whoever asked for its end."""


@dataclass(slots=True, eq=False)
class Row:
    """One completion."""

    id: str
    """The engine core's name of it."""
    token_ids: list[int] = field(default_factory=list)
    num_likeliest: int = 0
    """So many of each place's likeliest tokens were asked for."""
    logprobs: list[float] = field(default_factory=list)
    """Of each token, as it was sampled."""
    likeliest: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Where they were asked for: token ids int [n, 1 + num_likeliest], the sampled one first, and log-probabilities."""
    starts: list[tuple[str, int]] = field(default_factory=list)
    """Each version label, and the first token that it made."""
    reason: str = ""
    """Why it ended; "" until then."""
    watcher: StopWatcher | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it ended before its end: it was ended from outside, or something failed inside vLLM ("error")."""
        return self.reason not in (STOP, LENGTH)

    def versions(self) -> Iterator[tuple[str, int]]:
        """Each version label in turn, and how many tokens it made. Raises PolicyError where vLLM told of none."""
        if not self.starts and self.token_ids:
            raise PolicyError("vLLM returned tokens without the version that made them.")
        edges = pairwise([*(start for _, start in self.starts), len(self.token_ids)])
        for (label, _), (start, end) in zip(self.starts, edges, strict=True):
            yield label, end - start


@dataclass(slots=True, eq=False)
class Finished:
    """A request whose completions have all ended."""

    id: str
    rows: list[Row]
    """In order."""
    prompt_logprobs: np.ndarray
    """float32 [T - 1], of the prompt's tokens after the first, where they were asked for; else empty."""


@dataclass(slots=True, eq=False)
class _Request:
    rows: list[Row] = field(default_factory=list)
    num_left: int = 0
    """Rows that have not ended."""
    prompt_logprobs: list[np.ndarray] = field(default_factory=list)

    def finished(self, id: str) -> Finished:
        prompt = np.concatenate([np.zeros(0, np.float32), *self.prompt_logprobs])
        return Finished(id=id, rows=self.rows, prompt_logprobs=prompt)


@dataclass(slots=True, eq=False)
class _Step:
    """What an `LLMEngine` wants to know of a step."""

    request_outputs: list[Finished]
    reqs_to_abort: list[str]
    """Rows that ended here and that the engine core does not know to have ended."""


class Outputs:
    """Collects the rows of one LLMEngine's requests. Their ids, as they were given, are unique among the unfinished."""

    def __init__(self, engine: Any) -> None:
        """Take the place of the engine's output processor, which must have had no request yet."""
        self._engine = engine
        self._requests: dict[str, _Request] = {}
        self._of_row: dict[str, tuple[Row, str]] = {}
        """Rows that have not ended, with the ids of their requests, by their own."""
        engine.output_processor = self

    def row_ids(self, id: str) -> list[str]:
        """The engine core's names of a request's rows, in order."""
        return [row.id for row in self._requests[id].rows]

    def watch(self, id: str, make: Callable[[], StopWatcher]) -> None:
        """Have each row of a request that has just entered watched for stop strings."""
        for row in self._requests[id].rows:
            row.watcher = make()

    def end(self, id: str) -> list[Row]:
        """End a request; returns its rows, those that had not ended as far as they came; none if it is not known."""
        request = self._requests.get(id)
        if request is None:
            return []
        self._engine.abort_request([id])
        return request.rows

    # What an LLMEngine asks for.

    def add_request(self, request: Any, prompt: str | None, parent: Any = None, index: int = 0) -> None:
        """A row enters: completion `index` of its request."""
        row = Row(id=request.request_id, num_likeliest=request.sampling_params.logprobs or 0)
        whole = self._requests.setdefault(request.external_req_id, _Request())
        assert index == len(whole.rows), "vLLM adds the rows of a request in order"
        whole.rows.append(row)
        whole.num_left += 1
        self._of_row[row.id] = row, request.external_req_id

    def process_outputs(
        self,
        outputs: Sequence[Any],
        *,
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
        weight_version: str | None = None,
    ) -> _Step:
        """Take in what a step of the engine core made."""
        step, of_row = _Step([], []), self._of_row
        for output in outputs:
            known = of_row.get(output.request_id)
            if known is None:  # it was ended meanwhile
                continue
            row, reason = known[0], output.finish_reason
            if output.new_token_ids:
                if weight_version is not None and (not row.starts or row.starts[-1][0] != weight_version):
                    row.starts.append((weight_version, len(row.token_ids)))
                row.token_ids += output.new_token_ids
                _take_logprobs(row, output.new_logprobs)
                if row.watcher is not None and row.watcher.completed_by(output.new_token_ids):
                    reason = STOP
            if output.new_prompt_logprobs_tensors is not None:
                of_prompt = output.new_prompt_logprobs_tensors.logprobs[:, 0]  # first that of the token itself
                self._requests[known[1]].prompt_logprobs.append(of_prompt.float().cpu().numpy())
            if reason is not None:
                self._ended(row, str(reason), step.request_outputs)
                if output.finish_reason is None:
                    step.reqs_to_abort.append(row.id)
        return step

    def abort_requests(self, ids: Iterable[str], internal: bool) -> list[str]:
        """Forget requests; returns the rows of them that had not ended, for the engine core to end."""
        assert not internal, "requests are ended as a whole, by the ids that they were given"
        left: list[str] = []
        for id in ids:
            for row in [row for row in self._requests[id].rows if not row.reason]:
                self._ended(row, ABORT, [])
                left.append(row.id)
        return left

    def has_unfinished_requests(self) -> bool:
        """Whether a row has not ended."""
        return bool(self._of_row)

    def get_num_unfinished_requests(self) -> int:
        """Rows that have not ended."""
        return len(self._of_row)

    def update_scheduler_stats(self, stats: Any) -> None:
        """Statistics are not kept."""

    def _ended(self, row: Row, reason: str, finished: list[Finished]) -> None:
        """A row ended; the last one of a request ends the request, which is told to `finished`."""
        row.reason = reason
        _, id = self._of_row.pop(row.id)
        request = self._requests[id]
        request.num_left -= 1
        if not request.num_left:
            del self._requests[id]
            finished.append(request.finished(id))


def _take_logprobs(row: Row, found: Any) -> None:
    if found is None:
        return
    row.logprobs += found.logprobs[:, 0].tolist()
    if row.num_likeliest:
        wanted = slice(0, 1 + row.num_likeliest)  # the arrays are as wide as the row that asked for most needs it
        row.likeliest.append((found.logprob_token_ids[:, wanted], found.logprobs[:, wanted]))
