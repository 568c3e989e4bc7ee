"""`bench rules`: the same trace under every rule, and figures that tell the rules apart."""

import dataclasses
import json

import numpy as np
import pytest

from forge_async.apps.bench import rules
from forge_async.core.errors import ConfigError


@pytest.fixture(scope="module")
def figures():
    """Of a shorter game."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "NUM_STEPS", 80)
        trace = rules.Trace.seeded(0)
        of = {"ours": rules.Ours, "barrier": rules.Barrier, "discard": rules.DiscardAndRequeue, "stream": rules.Stream}
        return {name: rules.play(rule, trace) for name, rule in of.items()}


def test_only_the_unbounded_stream_breaks_the_bound(figures):
    assert {name for name, row in figures.items() if row["staleness_max"] > rules.MAX_STALENESS} == {"stream"}


def test_ours_trains_slow_prompts_as_often_as_they_are_drawn_and_wastes_only_what_failed(figures):
    assert figures["ours"]["slow_trained_over_drawn"] == pytest.approx(1.0, abs=0.05)
    assert figures["ours"]["wasted_fraction"] < 2 * rules.FAIL_SHARE
    assert figures["discard"]["wasted_fraction"] > 0.2
    assert figures["discard"]["slow_never_trained_fraction"] > figures["ours"]["slow_never_trained_fraction"]


def test_waiting_for_the_slowest_replica_costs_time(figures):
    assert figures["barrier"]["step_s"] > figures["ours"]["step_s"]


def test_without_slow_prompts_ours_is_near_the_ideal():
    trace = rules.Trace.seeded(1)
    easy = dataclasses.replace(trace, latency_s=np.full(len(trace.slow), rules.FAST_S))
    assert rules.play(rules.Ours, easy)["fraction_of_ideal"] > 0.9


def test_a_recorded_trace_keeps_the_order_and_the_shape(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = [
        {"index": index, "admitted_s": 1.0, "scored_s": 1.0 + index % 10 + 1, "ended_s": 50.0, "outcome": "trained"}
        for index in reversed(range(400))
    ]
    lines[0] |= {"scored_s": None, "outcome": "failed"}
    lines[1] |= {"scored_s": None, "outcome": "cancelled"}
    lines.append({"event": "store_restarted", "time_s": 3.0})
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = rules.Trace.recorded(path)
    assert len(trace.latency_s) == 399 and trace.fails.sum() == 1 and trace.fails[-1]
    assert trace.latency_s[9] / trace.latency_s[0] == pytest.approx(10.0)
    assert np.median(trace.latency_s) == pytest.approx(rules.FAST_S)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"index": 0, "admitted_s": 0, "scored_s": 1}'])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "events.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--trace"):
        rules.Trace.recorded(path)
