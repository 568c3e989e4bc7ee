"""Groups that come in together: as if they had come one by one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from forge_async.core.errors import StalenessError
from forge_async.replay.admission import Prompts
from forge_async.replay.buffer import group_bytes
from forge_async.replay.journal import Journal
from forge_async.replay.settings import AsyncSettings
from forge_async.replay.state import ReplayState
from tests.strategies import make_group


def replay(num: int, journal: Path | None = None) -> ReplayState:
    state = ReplayState(
        settings=AsyncSettings(max_staleness=3, on_stale="reweight"),
        groups_per_step=num,
        prompts=Prompts(source="s", epoch_size=5),
        tokens_guess=10,
        journal=None if journal is None else Journal.open(journal),
    )
    state.add_replica("r0", 0)
    return state


def test_groups_put_together_leave_what_groups_put_one_by_one_leave(tmp_path) -> None:
    """Of several versions, of several samples, one already known, one without a sampled token."""
    steps = [[[2, 3], [3]], [[0]], [[], [1, 0, 2]], [[3, 3, 1]], [[]]]
    states, journals = [], [tmp_path / name for name in ("together", "one_by_one")]
    for path in journals:
        state = replay(5, path)
        given = state.admit("r0", 5)
        made = [make_group(one.index, one.prompt_id, each) for one, each in zip(given, steps, strict=True)]
        made.append(made[1])
        news = [state.put(made)] if not states else [state.put([group]) for group in made]
        assert sum(news) == 5
        states.append((state, made))
    (together, made), (one_by_one, _) = states
    assert journals[0].read_bytes() == journals[1].read_bytes() and together.ledger == one_by_one.ledger
    for group in made:
        assert together.buffer[group.index].oldest_steps.tolist() == group.samples.oldest_steps().tolist()
        assert together.ledger.entries[group.index].oldest_step == group.oldest_step()
    assert together.buffer.num_bytes == sum(map(group_bytes, made[:5]))
    assert together.take(0) == made[:5] and one_by_one.take(0) is not None
    assert together.state() == one_by_one.state()


def test_groups_before_one_that_cannot_be_put_are_kept() -> None:
    state = replay(3)
    first, empty, last = (make_group(one.index, one.prompt_id, [[0]]) for one in state.admit("r0", 3))
    empty = dataclasses.replace(empty, samples=empty.samples.select([]))
    with pytest.raises(StalenessError, match=f"Group {empty.index} has no samples"):
        state.put([first, empty, last])
    assert [*state.ledger.ready] == [first.index] and len(state.buffer) == 1
