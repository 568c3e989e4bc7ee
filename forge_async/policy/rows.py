"""Completions row by row, and requests that go on from what an earlier try has made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.core import kept_sets, routing
from forge_async.core.errors import PolicyError
from forge_async.core.records import Completions
from forge_async.core.rng import derive_seed
from forge_async.core.versions import VersionRuns
from forge_async.policy.ports import GenerationRequest, GenerationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One completion."""

    token_ids: np.ndarray
    """int32 [T]."""
    logprobs: np.ndarray
    """float32 [T]."""
    versions: VersionRuns
    """Of the T tokens."""
    truncated: bool
    cut: bool
    kept_set: np.ndarray | None = None
    """int32 [T, K], -1 padded, where the sampler left tokens out."""
    routed_experts: np.ndarray | None = None
    """[prompt tokens + T, layers, experts a token], where the engine records them."""


EMPTY = Row(
    token_ids=np.zeros(0, dtype=np.int32),
    logprobs=np.zeros(0, dtype=np.float32),
    versions=VersionRuns.of(()),
    truncated=False,
    cut=True,
)
"""A completion that was cut before its first token."""


def rows_of(completions: Completions) -> list[Row]:
    """The completions one by one."""
    edges, routed = completions.bounds().tolist(), _routed_of_rows(completions)
    return [
        Row(
            token_ids=completions.token_ids[start:stop],
            logprobs=completions.logprobs[start:stop],
            versions=completions.versions.slice(start, stop),
            truncated=bool(completions.truncated[number]),
            cut=bool(completions.cut[number]),
            kept_set=None if completions.kept_set is None else completions.kept_set[start:stop],
            routed_experts=routed[number],
        )
        for number, (start, stop) in enumerate(zip(edges[:-1], edges[1:], strict=True))
    ]


def completions_of(rows: Sequence[Row]) -> Completions:
    """Rows laid end to end."""
    return Completions(
        lengths=np.array([len(row.token_ids) for row in rows], dtype=np.int32),
        token_ids=np.concatenate([row.token_ids for row in rows]),
        logprobs=np.concatenate([row.logprobs for row in rows]),
        versions=VersionRuns.of(run for row in rows for run in _runs(row.versions)),
        truncated=np.array([row.truncated for row in rows]),
        cut=np.array([row.cut for row in rows]),
        kept_set=_laid_together(rows),
        routed_experts=_routed_together(rows),
    )


def without_cut_rows(completions: Completions) -> Completions:
    """The same with every row that was cut emptied, so that it starts again from the prompt."""
    return completions_of([EMPTY if row.cut else row for row in rows_of(completions)])


def nothing_made(request: GenerationRequest) -> GenerationResult:
    """What a request that never entered the engine has: what it was given, or nothing."""
    made = request.prefix if request.prefix is not None else completions_of([EMPTY] * request.num_samples)
    return GenerationResult(id=request.id, completions=made)


class Continuation:
    """A request with a prefix, as requests of one row each, and their rows stitched to what was given.

    Complete rows of the prefix are kept as they are. The engine sees only plain requests.
    """

    def __init__(self, request: GenerationRequest) -> None:
        """Raises PolicyError when the prefix does not belong to the request."""
        assert request.prefix is not None
        self._id, self._rows = request.id, rows_of(request.prefix)
        if len(self._rows) != request.num_samples:
            raise PolicyError(
                f"it asks for {request.num_samples} completions with a prefix of {len(self._rows)}; give a row for each"
            )
        too_long = [len(row.token_ids) for row in self._rows if row.cut]
        if too_long and max(too_long) >= request.sampling.max_new_tokens:
            raise PolicyError(
                f"its prefix has {max(too_long)} tokens of at most {request.sampling.max_new_tokens}; "
                "mark a row that is complete as not cut"
            )
        self.parts = {f"{request.id}#{number}": self._part(request, number) for number in self._unfinished()}
        """Plain requests by id, to be given to the engine."""

    def add(self, part: GenerationResult) -> None:
        """Take in what the engine made of a part, finished or cut."""
        number = int(part.id.rpartition("#")[2])
        (made,) = rows_of(part.completions)
        self._rows[number] = _stitched(self._rows[number], made)
        del self.parts[part.id]

    @property
    def done(self) -> bool:
        """Whether every part was taken in."""
        return not self.parts

    def result(self) -> GenerationResult:
        """All rows, each from its first token."""
        return GenerationResult(id=self._id, completions=completions_of(self._rows))

    def _unfinished(self) -> list[int]:
        return [number for number, row in enumerate(self._rows) if row.cut]

    def _part(self, request: GenerationRequest, number: int) -> GenerationRequest:
        given = self._rows[number].token_ids
        sampling = request.sampling
        return GenerationRequest(
            id=f"{request.id}#{number}",
            prompt_token_ids=np.concatenate([request.prompt_token_ids, given]),
            num_samples=1,
            num_given=len(given),
            seed=continued_seed(request.seed + number, len(given)),
            sampling=dataclasses.replace(sampling, max_new_tokens=sampling.max_new_tokens - len(given)),
        )


def continued_seed(seed: int, num_tokens: int) -> int:
    """Seed of a completion that goes on after `num_tokens`, so that it does not draw what its first tokens drew."""
    return derive_seed(seed, "continued", num_tokens) if num_tokens else seed


def _stitched(given: Row, made: Row) -> Row:
    return Row(
        token_ids=np.concatenate([given.token_ids, made.token_ids]),
        logprobs=np.concatenate([given.logprobs, made.logprobs]),
        versions=VersionRuns.concat([given.versions, made.versions]),
        truncated=made.truncated,
        cut=made.cut,
        kept_set=_laid_together([given, made]),
        routed_experts=routing.later(given.routed_experts, made.routed_experts),
    )


def _laid_together(rows: Sequence[Row]) -> np.ndarray | None:
    return kept_sets.lay_together([row.kept_set for row in rows], [len(row.token_ids) for row in rows])


def _routed_of_rows(completions: Completions) -> list[np.ndarray | None]:
    """The record of each completion, its prompt's included."""
    routed, lengths = completions.routed_experts, completions.lengths.astype(np.int64)
    if routed is None:
        return [None] * len(lengths)
    num_prompt = (len(routed) - int(lengths.sum())) // len(lengths)
    return list(np.split(routed, np.cumsum(lengths + num_prompt)[:-1]))


def _routed_together(rows: Sequence[Row]) -> np.ndarray | None:
    """Records end to end; a row without one, which was cut before it began, has the prompt's length of unknown ones."""
    parts = [row.routed_experts for row in rows]
    prompts = [len(part) - len(row.token_ids) for row, part in zip(rows, parts, strict=True) if part is not None]
    return routing.lay_together(parts, [max(prompts, default=0) + len(row.token_ids) for row in rows])


def _runs(versions: VersionRuns) -> Iterator[tuple[int, int, int]]:
    yield from zip(versions.lengths.tolist(), versions.steps.tolist(), versions.incarnations.tolist(), strict=True)
