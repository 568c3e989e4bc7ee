"""Packing loses no sample and no token, keeps its limits, and gives the same batches for the same input."""

import dataclasses
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.records import Group, PromptId, Samples
from forge_async.core.versions import NOT_SAMPLED, VersionRuns
from forge_async.learner.batch import split_batch, split_samples
from forge_async.learner.layout import Layout, lay_out, step_cost
from forge_async.learner.packing import balanced_micro_batches, micro_batches, pack_rows, partition, sample_costs
from forge_async.learner.prefixes import Prefixes
from forge_async.learner.rows import build_micro_batches

lengths = st.lists(st.integers(1, 40), max_size=40)


@st.composite
def some_samples(draw):
    """Samples of a prompt and a completion each, with values that tell every sampled token from every other, and
    prompts of which some are equal, or differ in their last token alone."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=12))
    total = sum(map(sum, sizes))
    mask = np.concatenate([np.repeat([False, True], pair) for pair in sizes])
    runs = [run for prompt, new in sizes for run in ((prompt, NOT_SAMPLED, 0), (new, 1, 0))]
    unique = np.arange(1, total + 1)
    prompts = [np.arange(size) + 1000 * draw(st.integers(1, 2)) for size, _ in sizes]
    for prompt in prompts:
        prompt[-1] += draw(st.integers(0, 1))
    made = iter(np.split(unique, np.cumsum([sum(pair) for pair in sizes])[:-1]))
    tokens = [np.concatenate([prompt, own[len(prompt) :]]) for prompt, own in zip(prompts, made, strict=True)]
    return Samples(
        lengths=np.array([sum(pair) for pair in sizes], dtype=np.int32),
        token_ids=np.concatenate(tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=(-unique * mask / 8).astype(np.float32),
        advantages=(unique * mask / 4).astype(np.float32),
        versions=VersionRuns.of(runs),
    )


def costs_of(lengths, attention_tokens):
    return sample_costs(np.array(lengths, dtype=np.int64), attention_tokens).tolist()


@given(lengths, st.integers(1, 50))
def test_every_sample_lies_in_exactly_one_row(lengths, row_tokens):
    rows = pack_rows(lengths, row_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert pack_rows(lengths, row_tokens) == rows


@given(lengths, st.integers(1, 50))
def test_each_sample_goes_to_the_first_row_that_has_room_the_longest_first(lengths, row_tokens):
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        fitting = (row for row in rows if sum(lengths[other] for other in row) + lengths[index] <= row_tokens)
        row = next(fitting, None)
        if row is None:
            rows.append(row := [])
        row.append(index)
    assert pack_rows(lengths, row_tokens) == sorted(sorted(row) for row in rows)


@given(lengths, st.integers(1, 50))
def test_only_a_single_oversize_sample_makes_a_row_too_wide(lengths, row_tokens):
    for row in pack_rows(lengths, row_tokens):
        assert sum(lengths[index] for index in row) <= row_tokens or len(row) == 1


@given(lengths.filter(bool), st.integers(40, 60))
def test_packing_wastes_less_than_half(lengths, row_tokens):
    rows = pack_rows(lengths, row_tokens)
    assert len(rows) == 1 or sum(lengths) * 2 > len(rows) * row_tokens


@given(lengths, st.integers(1, 100))
def test_micro_batches_hold_every_row_once_in_order_within_the_limit(widths, limit):
    batches = micro_batches(widths, limit)
    assert [index for batch in batches for index in batch] == list(range(len(widths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(widths[index] for index in batch) <= limit


@given(lengths, st.integers(1, 6))
def test_shares_hold_every_sample_once_and_differ_by_less_than_the_longest(lengths, num_ranks):
    shares = partition(lengths, num_ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(lengths[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(lengths, st.integers(1, 6), st.integers(1, 100))
def test_shares_differ_in_cost_by_less_than_the_costliest_sample(lengths, num_ranks, attention_tokens):
    costs = costs_of(lengths, attention_tokens)
    loads = [sum(costs[index] for index in share) for share in partition(costs, num_ranks)]
    assert max(loads) - min(loads) <= max(costs, default=0) * (1 + 1e-9)


@given(lengths, st.integers(1, 100), st.integers(0, 5), st.integers(1, 100))
def test_balanced_micro_batches_hold_every_row_once_within_the_limit_costliest_first(widths, limit, more, length):
    costs = costs_of(widths, length)
    count = len(micro_batches(widths, limit)) + more
    batches = balanced_micro_batches(widths, costs, limit, count)
    assert len(batches) == count
    assert sorted(index for batch in batches for index in batch) == list(range(len(widths)))
    for batch in batches:
        assert len(batch) <= 1 or len(batch) * max(widths[index] for index in batch) <= limit
    loads = [sum(costs[index] for index in batch) for batch in batches]
    assert loads == sorted(loads, reverse=True)
    if limit >= sum(widths) + len(widths) * max(widths, default=0):
        assert max(loads, default=0) - min(loads, default=0) <= max(costs, default=0) * (1 + 1e-9)


layouts = st.builds(
    Layout,
    row_tokens=st.integers(1, 30),
    micro_batch_tokens=st.integers(1, 80),
    packed=st.booleans(),
    attention_tokens=st.integers(1, 100),
    mini_batches=st.integers(1, 3),
    share_prompts=st.booleans(),
)


@st.composite
def families(draw):
    """Lengths of samples, and which of them begin alike: samples of one family have the same beginning and more."""
    labels = draw(st.lists(st.integers(0, 4), min_size=1, max_size=30))
    beginnings = draw(st.lists(st.integers(0, 12), min_size=5, max_size=5))
    lengths = [beginnings[label] + draw(st.integers(1, 25)) for label in labels]
    return lengths, Prefixes(
        families=np.array([labels.index(label) for label in labels]), lengths=np.array([beginnings[x] for x in labels])
    )


def width_of(row, lengths, prefixes):
    """Tokens of a row, worked out from who lies beside whom."""
    width, last = 0, None
    for index in row:
        shares = prefixes.families[index] == last
        width += lengths[index] - (prefixes.lengths[index] if shares else 0)
        last = prefixes.families[index]
    return width


@given(families(), layouts, st.integers(1, 6))
def test_families_lie_side_by_side_within_the_limits(family, layout, num_ranks):
    lengths, prefixes = family
    ranks = lay_out(lengths, layout, num_ranks, prefixes)
    assert len(ranks) == num_ranks and len({len(batches) for batches in ranks}) == 1
    assert sorted(i for batches in ranks for batch in batches for row in batch for i in row) == [*range(len(lengths))]
    for batch in (batch for batches in ranks for batch in batches if batch):
        widths = [width_of(row, lengths, prefixes) for row in batch]
        assert len(batch) == 1 or len(batch) * max(widths) <= layout.micro_batch_tokens
        for row, width in zip(batch, widths, strict=True):
            assert len(row) == 1 or (layout.packed and width <= max(layout.row_tokens, *lengths))
            order = [prefixes.families[index] for index in row]
            assert sum(one != other for one, other in pairwise(order)) == len(set(order)) - 1
    assert lay_out(lengths, layout, num_ranks, prefixes) == ranks


@given(st.integers(1, 6), st.integers(20, 40), st.integers(1, 4))
def test_groups_of_one_prompt_make_a_shorter_step_than_samples_apart(groups_a_rank, prompt, num_ranks):
    """Eight samples each with a prompt as long as their completions: with rows for a group, 7/16 of the tokens less."""
    lengths = [prompt + prompt] * 8 * groups_a_rank * num_ranks
    prefixes = Prefixes(families=np.arange(len(lengths)) // 8 * 8, lengths=np.full(len(lengths), prompt))
    layout = Layout(row_tokens=9 * prompt, micro_batch_tokens=9 * prompt)
    together = step_cost(lay_out(lengths, layout, num_ranks, prefixes), lengths, layout.attention_tokens, prefixes)
    apart = step_cost(lay_out(lengths, layout, num_ranks), lengths, layout.attention_tokens)
    assert together < 0.7 * apart


@given(lengths, layouts, st.integers(1, 6))
def test_ranks_have_equally_many_micro_batches_within_the_limits_and_every_sample_once(lengths, layout, num_ranks):
    ranks = lay_out(lengths, layout, num_ranks)
    assert len(ranks) == num_ranks and len({len(batches) for batches in ranks}) == 1
    assert sorted(i for batches in ranks for batch in batches for row in batch for i in row) == [*range(len(lengths))]
    for batch in (batch for batches in ranks for batch in batches if batch):
        widths = [sum(lengths[index] for index in row) for row in batch]
        assert len(batch) == 1 or len(batch) * max(widths) <= layout.micro_batch_tokens
        for row, width in zip(batch, widths, strict=True):
            assert len(row) == 1 or (layout.packed and width <= max(layout.row_tokens, *lengths))
    assert lay_out(lengths, layout, num_ranks) == ranks


@given(lengths.filter(bool), layouts, st.integers(1, 6))
def test_no_step_is_longer_than_when_ranks_share_samples_by_cost(lengths, layout, num_ranks):
    shares = partition(costs_of(lengths, layout.attention_tokens), num_ranks)
    alone = [lay_out([lengths[i] for i in share], layout)[0] for share in shares]
    slowest = max(sum(step_cost([[batch]], [lengths[i] for i in share], layout.attention_tokens) for batch in batches)
                  for share, batches in zip(shares, alone, strict=True))  # fmt: skip
    ranks = lay_out(lengths, layout, num_ranks)
    if max(map(len, alone)) == 1:
        assert step_cost(ranks, lengths, layout.attention_tokens) <= slowest * (1 + 1e-9)


@given(st.lists(some_samples(), min_size=1, max_size=4), layouts, st.integers(1, 4), st.booleans())
def test_mini_batches_divide_a_batch_by_groups(parts, layout, num_ranks, keep):
    source = PromptId(source="s", epoch=0, index=0)
    groups = [
        Group(index=number, prompt_id=source, samples=part, rewards=np.zeros(len(part)))
        for number, part in enumerate(parts)
    ]
    shares = split_batch(groups, num_ranks, keep_zero_advantage=keep, layout=layout)
    owner_of: dict[int, int] = {}
    tokens = 0
    for number in range(layout.mini_batches):
        own = [share.mini_batches[number] for share in shares]
        assert len({part.counts for part in own}) == 1 and len({len(part.batches) for part in own}) == 1
        rows = [
            rows
            for share, part in zip(shares, own, strict=True)
            for rows in build_micro_batches(share.samples, part.batches, share.skipped)
        ]
        assert own[0].counts.num_loss_tokens == sum(int(each.mask.sum()) for each in rows)
        tokens += own[0].counts.num_loss_tokens
        for share, part in zip(shares, own, strict=True):
            for index in (index for batch in part.batches for row in batch for index in row):
                assert owner_of.setdefault(share.origins[index][0], number) == number, "no group is divided"
    assert tokens == shares[0].num_loss_tokens
    assert sum(part.counts.num_batch_samples for part in shares[0].mini_batches) == sum(map(len, parts))


@given(some_samples(), layouts)
def test_every_sample_can_be_read_back_from_the_rows(samples, layout):
    found = []
    for rows in _one_rank(samples, layout):
        for b in range(len(rows.token_ids)):
            found += _documents(rows, b)
    edges = samples.bounds()
    wanted = [_sample(samples, int(a), int(b)) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    assert sorted(found) == sorted(wanted)


@given(some_samples(), layouts)
def test_no_token_of_a_row_is_there_twice_where_prompts_are_shared(samples, layout):
    batches = _one_rank(samples, dataclasses.replace(layout, share_prompts=False))
    apart = sum(rows.num_sample_tokens for rows in batches)
    assert apart == sum(max(1, length - 1) for length in samples.lengths.tolist())
    together = sum(rows.num_sample_tokens for rows in _one_rank(samples, layout))
    assert together <= apart
    if layout.packed and layout.share_prompts and layout.row_tokens > apart and layout.mini_batches == 1:
        begun = {tuple(tokens[: max(0, prompt - 1)]) for tokens, prompt in _prompts(samples)}
        rest = sum(max(1, len(tokens) - 1) - max(0, prompt - 1) for tokens, prompt in _prompts(samples))
        assert together == sum(map(len, begun)) + rest


@given(some_samples(), layouts)
def test_every_token_of_the_loss_is_counted_once(samples, layout):
    batches = _one_rank(samples, layout)
    assert sum(int(rows.mask.sum()) for rows in batches) == samples.num_loss_tokens
    assert all((rows.advantages[rows.mask == 0] == 0).all() for rows in batches)
    assert all((rows.behaviour_logprobs[rows.mask == 0] == 0).all() for rows in batches)


def _one_rank(samples, layout):
    """The rows of all mini-batches of a rank that has all samples."""
    (share,) = split_samples(samples, 1, layout)
    parts = share.mini_batches
    return [rows for part in parts for rows in build_micro_batches(share.samples, part.batches, share.skipped)]


def _prompts(samples):
    """(tokens, length of the prompt) of each sample; no prompt where nothing is trained on."""
    edges = samples.bounds().tolist()
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        mask = samples.loss_mask[start:stop]
        yield samples.token_ids[start:stop].tolist(), int(mask.argmax()) if mask.any() else 0


def _sample(samples, start, stop):
    """(tokens, and what is said of each token after the first: of those of the prompt nothing)."""
    ahead = slice(start + 1, stop)
    columns = (samples.loss_mask, samples.logprobs, samples.advantages)
    said = [column[ahead].astype(float).tolist() for column in columns]
    return samples.token_ids[start:stop].tolist() if stop - start > 1 else [0], said


def _documents(rows, b):
    """The samples of row b, padding left out: parts begin where positions do not go on, those above 0 with the first
    tokens of the last sample that begins at 0. Each has its last token from the target of the one before it."""
    positions = rows.positions[b].tolist()
    starts = [at for at, position in enumerate(positions) if not at or position != positions[at - 1] + 1]
    documents, whole = [], []
    for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
        segment, skipped = set(rows.segments[b, start:stop].tolist()), positions[start]
        assert len(segment) == 1
        if segment == {len(rows.sample_indices)}:
            assert not rows.mask[b, start:stop].any() and not skipped
            continue
        tokens = rows.token_ids[b, start:stop].tolist()
        assert rows.targets[b, start : stop - 1].tolist() == tokens[1:]
        last = int(rows.targets[b, stop - 1])
        columns = (rows.mask, rows.behaviour_logprobs, rows.advantages)
        said = [column[b, start:stop].astype(float).tolist() for column in columns]
        whole = whole if skipped else tokens
        if not last:  # a sample of a single token
            assert len(tokens) == 1 and not any(map(any, said))
            documents.append(([0], [[], [], []]))
            continue
        documents.append(([*whole[:skipped], *tokens, last], [[0.0] * skipped + each for each in said]))
    return documents
