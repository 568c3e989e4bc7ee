import dataclasses

import pytest

from forge_async.core.errors import FilterStallError
from forge_async.core.records import PromptId
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.auto_bound import AutoBound
from forge_async.pipeline.no_signal import NoSignal
from forge_async.pipeline.observers import Observers
from forge_async.pipeline.publish import Publication
from forge_async.replay.auto_staleness import AutoStaleness
from forge_async.replay.settings import AsyncSettings
from tests.fakes import FakeAdmission, group_record, learner_step, make_pull, step_result


def step(number, zero_fraction):
    made = learner_step(PolicyVersion(step=number + 1), [number])
    result = step_result(version=PolicyVersion(step=number + 1), figures={"advantage/zero_fraction": zero_fraction})
    return [dataclasses.replace(made, result=result)]


def test_batches_without_a_signal_end_the_run_by_name():
    guard = NoSignal(3)
    for number, share in enumerate((1.0, 1.0, 0.9, 1.0, 1.0)):
        guard.stepped(number, step(number, share))
    with pytest.raises(FilterStallError, match="last 3 batches had nothing to learn from.*max_filtered_batches=3"):
        guard.stepped(5, step(5, 1.0))


def test_every_observer_is_told_everything():
    class Notes:
        def __init__(self):
            self.told = []

        def __getattr__(self, name):
            return lambda *_: self.told.append(name)

    both = [Notes(), Notes()]
    observers = Observers(*both)
    observers.admitted([], "policy_0")
    observers.made([])
    observers.stepped(0, [])
    observers.published(Publication(version=PolicyVersion(), started_s=0.0, duration_s=0.0, num_bytes=0))
    observers.pulled("policy_0", make_pull(PolicyVersion()))
    assert [notes.told for notes in both] == [["admitted", "made", "stepped", "published", "pulled"]] * 2


def test_the_bound_follows_what_the_ring_shows():
    """Groups take 1.5 s and pulls 4 s while the learner needs 1 s a step and waits as S + 1 batches demand."""
    auto = AutoStaleness(begin=2, least=1, cap=8)
    now = [100.0]
    bound, moves = AutoBound(auto, lambda: now[0]), []
    for number in range(40):
        id = PromptId(source="fake", epoch=0, index=number)
        bound.admitted([FakeAdmission(index=number, prompt_id=id)], "policy_0")
        bound.made([dataclasses.replace(group_record(number), generated_s=now[0] + 1.0, scored_s=now[0] + 1.5)])
        bound.published(Publication(version=PolicyVersion(), started_s=0.0, duration_s=0.5, num_bytes=0))
        bound.pulled("policy_0", make_pull(PolicyVersion(), fetch_s=3.4, pause_s=0.1))
        wait_s = max(0.0, 5.5 / (auto.max_staleness + 1) - 1.0)
        now[0] += 1.0 + wait_s
        bound.stepped(number, [dataclasses.replace(step(number, 0.0)[0], wait_data_s=wait_s)])
        if move := bound.take_move():
            moves.append(move.max_staleness)
        assert bound.take_move() is None
    assert moves and moves[0] > 2
    assert auto.max_staleness in (5, 6), "six batches under way keep up"


def test_only_the_word_auto_has_a_controller():
    assert AutoStaleness.of(AsyncSettings(max_staleness=3), 4) is None
    auto = AutoStaleness.of(AsyncSettings(max_staleness="auto", max_staleness_cap=5), 4)
    assert auto is not None and auto.max_staleness == 2
