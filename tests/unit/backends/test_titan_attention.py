"""The three ways to attend in packed rows, one mask, part by part, gathered keys, are one: who sees whom is told by
positions alone. The kernel for GPUs is stood in for by torch's on CPU, call for call."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_async.backends import titan_attention
from forge_async.backends.titan_attention import CpuAttention, SharedVarlenAttention, gathered, mask_of, parts_of
from forge_async.learner.rows import sequence_rows
from tests.strategies import make_samples
from tests.unit.learner.micro import laid_out

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def positions_of(*rows):
    """int64 [B, L]."""
    return torch.tensor(rows)


@st.composite
def packed(draw):
    """Rows of the same width: samples, and what of others follows the beginning that they share with them."""
    width, rows = draw(st.integers(1, 14)), []
    for _ in range(draw(st.integers(1, 3))):
        row, longest = [], 0
        while len(row) < width:
            skipped = draw(st.integers(0, longest - 2)) if longest > 2 else 0
            count = draw(st.integers(1, 6))
            if row and skipped == row[-1] + 1:  # it would go on there
                skipped = 0
            row += range(skipped, skipped + count)
            longest = longest if skipped else min(count, len(row))
        rows.append(row[:width])
    return torch.tensor(rows)


def seen_by_definition(positions):
    """bool [B, 1, L, L], entry by entry."""
    rows, width = positions.shape
    seen = torch.zeros(rows, 1, width, width, dtype=torch.bool)
    for row, line in enumerate(positions.tolist()):
        for at in range(width):
            start = at
            while start and line[start] == line[start - 1] + 1:
                start -= 1
            whole = start
            while line[whole]:
                whole -= 1
            for other in range(at + 1):
                seen[row, 0, at, other] = other >= start or whole <= other < whole + line[start]
    return seen


def inputs_of(positions, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (*positions.shape, HEADS, HEAD_DIM)
    queries = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    keys, values = (
        torch.randn(*shape[:2], KV_HEADS, HEAD_DIM, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    return queries, keys, values


def attended(attention, positions, masks):
    """What comes out, and the gradients of queries, keys and values."""
    inputs = inputs_of(positions)
    found = attention(*inputs, attention_masks=masks, enable_gqa=True)
    found.square().sum().backward()
    return [found.detach(), *(each.grad for each in inputs)]


@given(packed())
def test_a_mask_says_who_sees_whom(positions):
    assert torch.equal(mask_of(positions), seen_by_definition(positions))


@given(packed())
def test_parts_tile_the_rows(positions):
    covered = [(part.row, column) for part in parts_of(positions) for column in range(part.start, part.stop)]
    assert covered == [(row, column) for row in range(positions.shape[0]) for column in range(positions.shape[1])]


@given(packed(), st.integers(1, 40))
def test_part_by_part_is_as_with_one_mask_whatever_the_lots(positions, entries):
    whole = attended(CpuAttention(CpuAttention.Config()), positions, mask_of(positions))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(titan_attention, "MASK_ENTRIES", entries)
        parts = attended(CpuAttention(CpuAttention.Config()), positions, parts_of(positions))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


def varlen_on_cpu(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, num_splits):
    """What torch documents of `varlen_attn`, causal masks aligned at the ends of queries and keys."""
    assert window_size == (-1, 0) and enable_gqa
    found, edges = [], list(zip(cu_seq_q.tolist(), cu_seq_k.tolist(), strict=True))
    assert (max_q, max_k) == tuple(int(each.diff().max()) for each in (cu_seq_q, cu_seq_k))
    for (q, k), (q_stop, k_stop) in zip(edges[:-1], edges[1:], strict=True):
        mask = torch.ones(q_stop - q, k_stop - k, dtype=torch.bool).tril(k_stop - k - (q_stop - q))
        heads_first = (query[q:q_stop], key[k:k_stop], value[k:k_stop])
        heads_first = tuple(each.transpose(0, 1)[None] for each in heads_first)
        one = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, attn_mask=mask, scale=scale, enable_gqa=True
        )
        found.append(one[0].transpose(0, 1))
    return torch.cat(found)


def shared_attention():
    attention = SharedVarlenAttention.__new__(SharedVarlenAttention)  # its own set-up asks for a GPU
    torch.nn.Module.__init__(attention)
    attention.window_size = (-1, 0)
    return attention


@given(packed())
def test_gathered_keys_are_those_that_the_mask_shows(positions):
    masks = gathered(parts_of(positions), positions.shape[1], torch.device("cpu"))
    attention = shared_attention()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(titan_attention, "varlen_attn", varlen_on_cpu)
        patch.setattr(torch, "bfloat16", torch.float64)  # the kernel's own dtype; here the comparison's
        shared = attended(attention, positions, masks)
    whole = attended(CpuAttention(CpuAttention.Config()), positions, mask_of(positions))
    for one, other in zip(whole, shared, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_all_that_share_a_beginning_are_summed_in_float32(monkeypatch):
    """511 parts ask the first token's key for a gradient of 1 each; bfloat16 adds no 1 to 256."""
    positions = torch.tensor([[0, *[1] * 511]])
    queries, keys, values = (torch.zeros(1, 512, 1, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    monkeypatch.setattr(titan_attention, "varlen_attn", lambda query, key, *_, **__: query + key.sum() / 512)
    masks = gathered(parts_of(positions), 512, positions.device)
    shared_attention()(queries, keys, values, attention_masks=masks, enable_gqa=True).sum().backward()
    assert keys.grad is not None and keys.grad.flatten()[:2].tolist() == [512, 1], "511 is 512 in bfloat16"


def test_a_part_that_is_longer_than_its_beginning_is_attended_without_a_mask(monkeypatch):
    positions, masks = torch.tensor([[0, 1, 2, 3, 2, 3, 2, 3, 4]]), []
    whole = attended(CpuAttention(CpuAttention.Config()), positions, mask_of(positions))
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args, attn_mask=None, **how):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    for one, other in zip(
        whole, attended(CpuAttention(CpuAttention.Config()), positions, parts_of(positions)), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert masks == [None, None, None]


def test_rows_that_share_prompts_say_so_by_their_positions():
    samples = make_samples([[1, 1], [2], [3, 3, 3]], prompt_tokens=3)
    samples.token_ids[:] = np.where(samples.loss_mask, samples.token_ids, 7)
    (rows,) = laid_out(samples, row_tokens=32, micro_batch_tokens=32)
    parts = parts_of(torch.from_numpy(rows.positions))
    assert [(part.start, part.stop, part.prefix, part.skipped) for part in parts] == [
        (0, 4, 0, 0),
        (4, 5, 0, 2),
        (5, 8, 0, 2),
    ]


def test_sequences_without_shared_prompts_are_whole_parts():
    positions = torch.from_numpy(sequence_rows([np.arange(3), np.arange(5)]).positions)
    assert [part.skipped for part in parts_of(positions)] == [0, 0]
    assert torch.equal(mask_of(positions)[0, 0], torch.ones(5, 5, dtype=torch.bool).tril())
