"""Policy versions, and the run-length code that says which version made each token (Law 4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.core.compact import Compact
from forge_async.core.errors import ForgeError

NOT_SAMPLED = -1
"""The step recorded for a token that no policy made: prompt tokens and what an environment answered."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PolicyVersion:
    """Which weights: a policy, the incarnation of its learner, and the learner's step.

    A restored learner starts a new incarnation, so that what a dead one published later than the restored step can
    never be mistaken for it. Versions of one policy order by (incarnation, step).
    """

    policy: str = "policy"
    """Name of the policy; a run may train several."""
    incarnation: int = 0
    """How often the learner was started anew, from 0."""
    step: int = 0
    """Optimiser steps behind these weights, in steps; 0 is the initial model."""

    def __str__(self) -> str:
        return f"{self.policy}@{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read what `str` wrote. Raises ForgeError when `text` is not of that form."""
        policy, at, rest = text.rpartition("@")
        incarnation, dot, step = rest.partition(".")
        if not (at and dot and incarnation.isdecimal() and step.isdecimal()):
            raise ForgeError(f"{text!r} is not a policy version: expected the form name@incarnation.step.")
        return cls(policy=policy, incarnation=int(incarnation), step=int(step))

    def precedes(self, other: PolicyVersion) -> bool:
        """Whether it is an older version of the same policy; those of different policies have no order in time."""
        return self.policy == other.policy and self < other

    def next(self) -> PolicyVersion:
        """The version after one more learner step."""
        return PolicyVersion(policy=self.policy, incarnation=self.incarnation, step=self.step + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRuns(Compact):
    """The version of every token of a flat token axis, run-length coded.

    The axis may hold one sequence or many laid end to end; a run never needs to respect a sequence boundary.
    """

    lengths: np.ndarray
    """int32 [R], tokens in each run, all positive."""
    steps: np.ndarray
    """int32 [R], the learner step that made the run's tokens, or NOT_SAMPLED."""
    incarnations: np.ndarray
    """int32 [R], the incarnation of that step (0 where NOT_SAMPLED)."""

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, int]]) -> VersionRuns:
        """Build from (length, step, incarnation) triples; empty runs vanish and equal neighbours join."""
        joined: list[list[int]] = []
        for length, step, incarnation in runs:
            if length < 0:
                raise ForgeError(f"A version run of {length} tokens is impossible.")
            if length and joined and joined[-1][1:] == [step, incarnation]:
                joined[-1][0] += length
            elif length:
                joined.append([length, step, incarnation])
        columns = np.asarray(joined, dtype=np.int32).reshape(-1, 3)
        return cls(lengths=columns[:, 0].copy(), steps=columns[:, 1].copy(), incarnations=columns[:, 2].copy())

    @classmethod
    def uniform(cls, num_tokens: int, version: PolicyVersion) -> VersionRuns:
        """All tokens made by one version."""
        return cls.of([(num_tokens, version.step, version.incarnation)])

    @classmethod
    def concat(cls, parts: Sequence[VersionRuns]) -> VersionRuns:
        """Lay token axes end to end."""
        if not parts:
            return cls.of([])
        return cls(
            lengths=np.concatenate([part.lengths for part in parts]),
            steps=np.concatenate([part.steps for part in parts]),
            incarnations=np.concatenate([part.incarnations for part in parts]),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens on the axis."""
        return int(self.lengths.sum())

    def per_token_steps(self) -> np.ndarray:
        """int32 [T], the step that made each token, NOT_SAMPLED where none did."""
        return np.repeat(self.steps, self.lengths)

    def oldest_step(self) -> int | None:
        """The smallest step that made a token, or None when no token was sampled."""
        sampled = self.steps[self.steps != NOT_SAMPLED]
        return int(sampled.min()) if sampled.size else None

    def take(self, tokens: np.ndarray) -> VersionRuns:
        """The runs of the given tokens of the axis (int [T]), in that order; equal neighbours join."""
        run = np.repeat(np.arange(len(self.lengths)), self.lengths)[tokens]
        steps, incarnations = self.steps[run], self.incarnations[run]
        changes = np.flatnonzero((np.diff(steps) != 0) | (np.diff(incarnations) != 0)) + 1
        firsts = np.concatenate([np.zeros(min(1, len(run)), dtype=np.int64), changes])
        return VersionRuns(
            lengths=np.diff(firsts, append=len(run)).astype(np.int32),
            steps=steps[firsts],
            incarnations=incarnations[firsts],
        )

    def slice(self, start: int, stop: int) -> VersionRuns:
        """The runs of tokens [start, stop) of the axis."""
        ends = np.cumsum(self.lengths)
        lengths = np.minimum(ends, stop) - np.maximum(ends - self.lengths, start)
        keep = lengths > 0
        return VersionRuns(
            lengths=lengths[keep].astype(np.int32), steps=self.steps[keep], incarnations=self.incarnations[keep]
        )

    def behind_prompts(self, rows: np.ndarray, num_prompt: int | np.ndarray) -> VersionRuns:
        """Put tokens that nobody sampled before each row of the axis.

        Args:
            rows: int [N], tokens of each row; all of the axis.
            num_prompt: tokens to insert before each row, 1 or more; int [N] where they differ.
        """
        run_ends, row_ends = np.cumsum(self.lengths, dtype=np.int64), np.cumsum(rows, dtype=np.int64)
        ends = np.union1d(run_ends, row_ends)
        ends = ends[ends > 0]
        lengths, runs = np.diff(ends, prepend=0), np.searchsorted(run_ends, ends)
        before = np.searchsorted(ends, row_ends - rows, side="right")
        sampled = np.ones(len(lengths) + len(rows), dtype=bool)
        sampled[before + np.arange(len(rows))] = False  # an empty row has its prompt and nothing after it

        def spread(values: np.ndarray, at_prompts: int | np.ndarray) -> np.ndarray:
            column = np.empty(len(sampled), dtype=np.int32)
            column[sampled], column[~sampled] = values, at_prompts
            return column

        return VersionRuns(
            lengths=spread(lengths, num_prompt),
            steps=spread(self.steps[runs], NOT_SAMPLED),
            incarnations=spread(self.incarnations[runs], 0),
        )
