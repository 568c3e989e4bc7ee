"""Which layout and which share a batch gets, against what `learner.layout` and `learner.batch` promise, in plain loops.

`test_packing_laws.py` says which layouts are legal; here there is one right answer, since all ranks and a resumed run
must come to the same.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.records import Group, PromptId, Samples
from forge_async.learner.batch import split_batch
from forge_async.learner.layout import lay_out
from forge_async.learner.prefixes import shared_prefixes
from tests.property.test_packing_laws import families, layouts, some_samples

exact = layouts.map(lambda layout: dataclasses.replace(layout, attention_tokens=1 << layout.attention_tokens % 8))
"""Costs without rounding, so that it does not matter in which order they are added up."""


@given(families(), exact, st.integers(1, 6))
def test_a_batch_has_the_layout_that_the_rules_give(family, layout, num_ranks):
    lengths, prefixes = family
    assert lay_out(lengths, layout, num_ranks, prefixes) == PlainLayout(lengths, prefixes, layout).best(num_ranks)
    assert lay_out(lengths, layout, num_ranks) == PlainLayout(lengths, None, layout).best(num_ranks)


class PlainLayout:
    """The rules of `lay_out`, each where it is needed, nothing worked out ahead. Rows are lists of samples."""

    def __init__(self, lengths, prefixes, layout):
        self.lengths, self.layout, self.samples = lengths, layout, range(len(lengths))
        self.family = list(self.samples) if prefixes is None else list(prefixes.families)
        self.prefix = [0] * len(lengths) if prefixes is None else list(prefixes.lengths)

    def best(self, num_ranks):
        apart = [[index] for index in self.samples]
        cuts = [self.by_family(), apart] if self.layout.packed and self.someone_shares() else [apart]
        ways = [self.shared] if not self.layout.packed else [self.shared, self.dealt] if num_ranks > 1 else [self.alone]
        found = [way(pieces, num_ranks) for pieces in cuts for way in ways]
        return min(found, key=self.step_cost)

    def someone_shares(self):
        return any(
            self.family.count(family) > 1 and prefix for family, prefix in zip(self.family, self.prefix, strict=True)
        )

    def by_family(self):
        pieces = []
        for first in dict.fromkeys(self.family):
            members = [index for index in self.samples if self.family[index] == first]
            own = [self.lengths[index] - self.prefix[first] for index in members]
            room = max([self.layout.row_tokens - self.prefix[first], *own])
            pieces += [[members[place] for place in piece] for piece in first_fit(own, room)]
        return pieces

    def twice(self, row):
        """The samples of a row that go on from the beginning of the one before them."""
        return [other for one, other in pairwise(row) if self.family[one] == self.family[other]]

    def width(self, row):
        return sum(self.lengths[i] for i in row) - sum(self.prefix[i] for i in self.twice(row))

    def cost(self, row):
        def of(tokens):
            return tokens + tokens**2 / self.layout.attention_tokens

        return sum(of(self.lengths[i]) for i in row) - sum(of(self.prefix[i]) for i in self.twice(row))

    def step_cost(self, ranks):
        def cost(batch):
            widths = [self.width(row) for row in batch]
            return sum(max(widths) - width for width in widths) + sum(self.cost(row) for row in batch)

        return sum(max(map(cost, at_once)) for at_once in zip(*ranks, strict=True))

    def rows(self, pieces):
        if not self.layout.packed or not pieces:
            return pieces
        widths = [self.width(piece) for piece in pieces]
        packed = first_fit(widths, max(self.layout.row_tokens, *widths, 0))
        return [sorted(sum((pieces[n] for n in row), []), key=lambda i: (self.family[i], i)) for row in packed]

    def alone(self, pieces, num_ranks):
        rows = self.rows(pieces)
        batches = self.in_order(sorted(rows, key=self.width, reverse=True))
        return [[[row for row in rows if row in batch] for batch in batches]]

    def shared(self, pieces, num_ranks):
        shares, loads = [[] for _ in range(num_ranks)], [0] * num_ranks
        for piece in sorted(pieces, key=self.cost, reverse=True):
            rank = loads.index(min(loads))
            shares[rank].append(piece)
            loads[rank] += self.cost(piece)
        rows = [self.rows([piece for piece in pieces if piece in share]) for share in shares]
        count = max(len(self.in_order(each)) for each in rows)
        return [self.spread(each, count) for each in rows]

    def dealt(self, pieces, num_ranks):
        rows = self.rows(pieces)
        rounds = -(-len(self.in_order(rows)) // num_ranks)
        batches = self.spread(rows, rounds * num_ranks)
        return [batches[rank::num_ranks] for rank in range(num_ranks)]

    def fits(self, batch, row):
        return (len(batch) + 1) * max(self.width(each) for each in [*batch, row]) <= self.layout.micro_batch_tokens

    def in_order(self, rows):
        batches = []
        for row in rows:
            if batches and self.fits(batches[-1], row):
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def spread(self, rows, count):
        """Even in cost, the costliest micro-batch first; cut in order where that cannot be within the limit."""
        batches = [[] for _ in range(count)]
        for row in sorted(rows, key=self.cost, reverse=True):
            fitting = [batch for batch in batches if not batch or self.fits(batch, row)]
            if not fitting or not self.layout.packed:
                batches = self.in_order(rows)
                batches += [[] for _ in range(count - len(batches))]
                break
            min(fitting, key=lambda batch: sum(map(self.cost, batch))).append(row)
        if self.layout.packed:
            batches.sort(key=lambda batch: sum(map(self.cost, batch)), reverse=True)
        return [[row for row in rows if row in batch] for batch in batches]


def first_fit(lengths, room):
    """The longest first, each into the first row that has room for it."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        fitting = (row for row in rows if sum(lengths[other] for other in row) + lengths[index] <= room)
        row = next(fitting, None)
        if row is None:
            rows.append(row := [])
        row.append(index)
    return sorted(sorted(row) for row in rows)


@given(st.lists(some_samples(), min_size=1, max_size=4), layouts, st.integers(1, 4), st.booleans(), st.booleans())
def test_a_share_says_what_its_samples_and_groups_are(parts, layout, num_ranks, keep, one_has_none):
    if one_has_none:  # no gradient, and so no place among the computed where those are left out
        parts[0] = dataclasses.replace(parts[0], advantages=np.zeros_like(parts[0].advantages))
    groups = [group_of(10 + number, part) for number, part in enumerate(parts)]
    shares = split_batch(groups, num_ranks, keep_zero_advantage=keep, layout=layout)
    told = {
        (group.index, number): Told(group.samples, number) for group in groups for number in range(len(group.samples))
    }
    kept = {origin: one for origin, one in told.items() if keep or any(one.advantages)}
    assert sorted(origin for share in shares for origin in share.origins) == sorted(kept)
    dealt = [group for group in groups if any(of == group.index for of, _ in kept)]
    dealt += [group for group in groups if group not in dealt]
    for share in shares:
        assert share.group_indices == tuple(group.index for group in groups)
        assert list(share.origins) == sorted(share.origins) and (share.samples is None) == (not share.origins)
        assert_counts(share.counts, kept.values(), told.values())
        for number, part in enumerate(share.mini_batches):
            own = {group.index for group in dealt[number :: layout.mini_batches]}
            assert_counts(part.counts, *([one for (of, _), one in some.items() if of in own] for some in (kept, told)))
            assert (part.counts.advantage_mean, part.counts.advantage_std) == (
                share.counts.advantage_mean,
                share.counts.advantage_std,
            )
            laid = [index for batch in part.batches for row in batch for index in row]
            assert sorted(laid) == [place for place, (of, _) in enumerate(share.origins) if of in own]
        if share.samples is not None:
            for place, origin in enumerate(share.origins):
                assert vars(Told(share.samples, place)) == vars(kept[origin])
            rows = [row for part in share.mini_batches for batch in part.batches for row in batch]
            skipped = [0] * len(share.samples)
            for one, other in (pair for row in rows for pair in pairwise(row)):
                before, after = (kept[share.origins[place]].beginning for place in (one, other))
                if before == after and layout.packed and layout.share_prompts:
                    skipped[other] = len(after)
            assert (share.skipped is None) == (not any(skipped))
            assert share.skipped is None or share.skipped.tolist() == skipped


def group_of(index, samples):
    prompt = PromptId(source="s", epoch=0, index=index)
    return Group(index=index, prompt_id=prompt, samples=samples, rewards=np.zeros(len(samples)))


class Told:
    """What there is to know of one sample."""

    def __init__(self, samples: Samples, number: int) -> None:
        here = slice(*samples.bounds()[number : number + 2].tolist())
        self.tokens = samples.token_ids[here].tolist()
        self.trained = samples.loss_mask[here].tolist()
        self.logprobs = samples.logprobs[here].tolist()
        self.advantages = samples.advantages[here].tolist()
        self.steps = samples.versions.per_token_steps()[here].tolist()
        prompt = self.trained.index(True) if any(self.trained) else 0
        self.beginning = self.tokens[: max(prompt - 1, 0)]
        """What others may have in common with it."""


def assert_counts(counts, kept, whole):
    assert counts.num_loss_tokens == sum(sum(one.trained) for one in kept)
    assert counts.num_samples == sum(any(one.trained) for one in kept)
    assert counts.num_batch_samples == len(whole)
    assert counts.num_samples_with_advantage == sum(any(one.advantages) for one in whole)


@given(st.lists(some_samples(), min_size=1, max_size=3), st.booleans(), st.integers(0, 2**16))
def test_families_begin_with_the_same_tokens_that_took_the_same_experts(parts, routed, seed):
    samples = Samples.concat(parts)
    if routed:
        experts = np.random.default_rng(seed).random((samples.num_tokens, 1, 2)) < 0.2
        samples = dataclasses.replace(samples, routed_experts=experts.astype(np.uint8))
    found, wanted, begun = shared_prefixes(samples), [], []
    for number, start in enumerate(samples.bounds()[:-1].tolist()):
        tokens = Told(samples, number).beginning
        stop = start + len(tokens)
        experts = samples.routed_experts[start:stop].tolist() if samples.routed_experts is not None else None
        begun.append((tokens, experts) if tokens else number)
        wanted.append(begun.index(begun[-1]))
        assert found.lengths[number] == len(tokens)
    assert list(found.families) == wanted
