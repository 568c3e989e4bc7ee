"""`policy.concurrency` on vLLM with a KV cache that is too small for all that is asked of it."""

from __future__ import annotations

import pytest

from tests.models import make_model

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(300)]


def test_auto_falls_when_the_cache_is_full_rises_again_and_has_fewer_sequences_preempted(engine_child, tmp_path):
    crowd = engine_child.build("tests.crowd:Crowd", str(make_model(tmp_path / "model")))
    everything, auto = crowd.answer("all", 80, 2, 100), crowd.answer("auto", 80, 2, 100)
    assert everything.num_tokens == auto.num_tokens > 0, "nothing is lost on the way"
    assert everything.num_preemptions > 0, "the cache was large enough for all, so that this test shows nothing"
    assert set(everything.limits) == {0}, "no limit"
    lowest = auto.limits.index(min(auto.limits))
    assert auto.limits[lowest] < 32, "half of policy.max_sequences, which it begins at"
    assert max(auto.kv_usage[: lowest + 1]) > 0.95 or max(auto.num_waiting[: lowest + 1]) > 0, "what made it fall"
    assert max(auto.limits[lowest:]) > auto.limits[lowest], "it rises where there is room"
    rises = [later - limit for limit, later in zip(auto.limits, auto.limits[1:], strict=False) if later > limit]
    assert set(rises) == {1}, "by one sequence at a time"
    assert auto.num_preemptions < everything.num_preemptions
