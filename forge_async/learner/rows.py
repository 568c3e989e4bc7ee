"""Packed rows as arrays: what the model and the loss are given.

A sample's last token is not among them: nobody asks what the model would make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.core import routing
from forge_async.core.kept_sets import NONE
from forge_async.core.records import Samples
from forge_async.core.versions import NOT_SAMPLED
from forge_async.learner.layout import MicroBatch
from forge_async.learner.prefixes import row_after_row

COLUMNS = ("token_ids", "positions", "targets", "mask", "behaviour_logprobs", "advantages", "steps", "segments")
"""The fields of Rows that are arrays of every micro-batch."""
FROZEN_COLUMNS = ("reference_logprobs", "teacher_logprobs")
"""Those of them that models which are only read have given."""
OPTIONAL_COLUMNS = ("kept_set", "routed_experts", *FROZEN_COLUMNS)
"""The fields of Rows that are arrays of some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A micro-batch of packed rows. Entry [b, l] of a target column speaks of the token that follows token [b, l]."""

    token_ids: np.ndarray
    """int64 [B, L]; 0 in padding."""
    positions: np.ndarray
    """int64 [B, L], position inside the sample. They go on by one inside a sample. One that begins above 0, at k, has
    its first k tokens in common with the last sample before it in the row that begins at 0, where they stand. Padding
    counts on by itself as a sample of its own."""
    targets: np.ndarray
    """int64 [B, L], the next token of the same sample; 0 in padding."""
    mask: np.ndarray
    """float32 [B, L], 1 where the next token is trained on."""
    behaviour_logprobs: np.ndarray
    """float32 [B, L], the sampler's log-probability of the next token."""
    advantages: np.ndarray
    """float32 [B, L], of the next token."""
    steps: np.ndarray
    """int64 [B, L], learner step of the version that made the next token; NOT_SAMPLED outside the mask."""
    segments: np.ndarray
    """int64 [B, L], number of the sample inside the micro-batch, from 0; the padding is the last."""
    sample_indices: tuple[int, ...] = ()
    """Which sample of the share each segment is; the padding has none."""
    kept_set: np.ndarray | None = None
    """int64 [B, L, K], the ids that the next token was sampled from, -1 padded; None: the whole vocabulary."""
    routed_experts: np.ndarray | None = None
    """uint8 or int16 [B, L, layers, experts a token] (`core/routing.py`), of the token itself; unknown in padding."""
    reference_logprobs: np.ndarray | None = None
    """float32 [B, L], of the next token, where the samples came with them."""
    teacher_logprobs: np.ndarray | None = None
    """The same of the teacher."""

    @property
    def num_sample_tokens(self) -> int:
        """Tokens of samples: those that are not padding."""
        return int((self.segments < len(self.sample_indices)).sum())

    @property
    def num_segments(self) -> int:
        """Samples, and one for the padding."""
        return len(self.sample_indices) + 1


def build_micro_batches(
    samples: Samples | None, batches: Sequence[MicroBatch], skipped: np.ndarray | None = None
) -> list[Rows]:
    """Fill the micro-batches of `learner.layout` with the samples that they name.

    Args:
        samples: N of them.
        batches: where they lie.
        skipped: int [N], of each sample the first tokens that its row holds already, as those of a sample before it of
            the same family (`learner.prefixes`); None: every sample is laid down whole.
    """
    if samples is None:
        return [empty_rows() for _ in batches]
    steps = np.where(samples.loss_mask, samples.versions.per_token_steps(), NOT_SAMPLED)
    spans = _Spans(samples, skipped)
    return [_fill(samples, spans, steps, batch) if batch else empty_rows() for batch in batches]


def empty_rows() -> Rows:
    """A micro-batch that trains nothing, for a rank that has fewer of them than another."""
    zeros = np.zeros((1, 2), dtype=np.int64)
    nothing = np.zeros((1, 2), dtype=np.float32)
    return Rows(
        token_ids=zeros,
        positions=np.arange(2, dtype=np.int64)[None],
        targets=zeros,
        mask=nothing,
        behaviour_logprobs=nothing,
        advantages=nothing,
        steps=zeros + NOT_SAMPLED,
        segments=zeros,
    )


def sequence_rows(sequences: Sequence[np.ndarray]) -> Rows:
    """One row a sequence, padded at the right, for scoring. Targets are the sequences shifted by one."""
    width = max(len(sequence) for sequence in sequences)
    shape = (len(sequences), width)
    token_ids, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.float32)
    for row, sequence in enumerate(sequences):
        count = len(sequence)
        token_ids[row, :count] = sequence
        targets[row, : count - 1] = sequence[1:]
        mask[row, : count - 1] = 1
    nothing = np.zeros(shape, np.float32)
    positions = np.broadcast_to(np.arange(width, dtype=np.int64), shape).copy()
    return Rows(
        token_ids=token_ids,
        positions=positions,
        targets=targets,
        mask=mask,
        behaviour_logprobs=nothing,
        advantages=nothing,
        steps=np.full(shape, NOT_SAMPLED, np.int64),
        segments=np.zeros(shape, np.int64),
    )


class _Spans:
    """What of each sample is laid down for it alone."""

    def __init__(self, samples: Samples, skipped: np.ndarray | None) -> None:
        """`skipped` as `build_micro_batches` has it."""
        self.single = samples.lengths == 1
        """bool [N], whether it is of one token, which stays though none follows."""
        self.starts = samples.bounds()[:-1]
        """int64 [N], where on the flat axis each sample starts."""
        self.begins = self.starts if skipped is None else self.starts + skipped
        """int64 [N], where its part begins."""
        self.sizes = self.starts + row_lengths(samples) - self.begins
        """int64 [N], tokens of that part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """What lies in the cells of a micro-batch. A row is filled from its left, so all of them are, one after another."""

    order: np.ndarray
    """int64 [n], the samples, row after row."""
    sizes: np.ndarray
    """int64 [n], tokens that are laid down for each."""
    columns: np.ndarray
    """int64 [B, L], of each cell how far it lies behind the last token of its row, below 0 in the samples."""
    filled: np.ndarray
    """bool [B, L], whether a token of a sample lies there."""
    tokens: np.ndarray
    """int64, of each filled cell the token's place on the flat axis."""
    speaking: np.ndarray
    """bool [B, L], whether a token follows there: all filled cells but samples of a single token."""
    ahead: np.ndarray
    """int64, of each speaking cell the place of the token that follows."""


def _cells(spans: _Spans, rows: MicroBatch) -> _Cells:
    order, row_of = row_after_row(rows)
    begins, sizes = spans.begins[order], spans.sizes[order]
    widths = np.bincount(row_of, sizes).astype(np.int64)
    columns = np.arange(widths.max()) - widths[:, None]
    speaking = filled = columns < 0
    tokens = np.arange(sizes.sum()) + np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
    ahead = tokens + 1
    if (single := spans.single[order]).any():
        speaking, speaks = filled.copy(), ~np.repeat(single, sizes)
        speaking[filled], ahead = speaks, ahead[speaks]
    return _Cells(
        order=order, sizes=sizes, columns=columns, filled=filled, tokens=tokens, speaking=speaking, ahead=ahead
    )


def _fill(samples: Samples, spans: _Spans, steps: np.ndarray, rows: MicroBatch) -> Rows:
    """`steps`: int [T], of each token that is trained on the step that made it, NOT_SAMPLED elsewhere."""
    cells = _cells(spans, rows)
    shape, count, positions = cells.filled.shape, len(cells.order), cells.columns
    segments = np.full(shape, count, np.int64)
    positions[cells.filled] = cells.tokens - np.repeat(spans.starts[cells.order], cells.sizes)
    segments[cells.filled] = np.repeat(np.arange(count), cells.sizes)

    def of_tokens(column: np.ndarray, laid: np.ndarray) -> np.ndarray:
        laid[cells.filled] = column.take(cells.tokens, axis=0)
        return laid

    def of_targets(column: np.ndarray, laid: np.ndarray) -> np.ndarray:
        laid[cells.speaking] = column.take(cells.ahead, axis=0)
        return laid

    sets, routed, floats = samples.kept_set, samples.routed_experts, _float_columns(samples)
    return Rows(
        token_ids=of_tokens(samples.token_ids, np.zeros(shape, np.int64)),
        positions=positions,
        targets=of_targets(samples.token_ids, np.zeros(shape, np.int64)),
        steps=of_targets(steps, np.full(shape, NOT_SAMPLED, np.int64)),
        segments=segments,
        sample_indices=tuple(cells.order.tolist()),
        kept_set=None if sets is None else of_targets(sets, np.full((*shape, sets.shape[1]), NONE, np.int64)),
        routed_experts=None if routed is None else of_tokens(routed, _unrouted(shape, routed)),
        **{name: of_targets(column, np.zeros(shape, np.float32)) for name, column in floats.items()},
    )


def row_lengths(samples: Samples) -> np.ndarray:
    """int32 [N], the tokens that each sample has in a row: all but its last; a single token stays."""
    return np.maximum(samples.lengths - 1, 1)


def _float_columns(samples: Samples) -> dict[str, np.ndarray]:
    """[T] each, by the field of Rows that they fill."""
    always = {"mask": samples.loss_mask, "behaviour_logprobs": samples.logprobs, "advantages": samples.advantages}
    return always | {name: each for name, each in samples.optional_columns().items() if name in FROZEN_COLUMNS}


def lay_back(
    found: np.ndarray, samples: Samples, rows: MicroBatch, flat: np.ndarray, skipped: np.ndarray | None = None
) -> None:
    """Write what was found for the targets of packed rows to the tokens that they are: `build_micro_batches` undone.

    Args:
        found: [B, L], entry [b, l] of the token that follows token [b, l].
        samples: T tokens.
        rows: where its samples lie.
        flat: [T], written where these samples have tokens to train on.
        skipped: as `build_micro_batches` had it.
    """
    if not rows:
        return
    cells = _cells(_Spans(samples, skipped), rows)
    flat[cells.ahead] = np.where(samples.loss_mask[cells.ahead], found[cells.speaking], 0)


def _unrouted(shape: tuple[int, int], like: np.ndarray) -> np.ndarray:
    """[B, L, layers, experts a token], all unknown."""
    return routing.unknown(shape[0] * shape[1], like).reshape(*shape, *like.shape[1:])
