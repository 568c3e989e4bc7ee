"""The arithmetic of the bound, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from forge_async.core.errors import ConfigError
from forge_async.replay.bound import UNLIMITED, Bound, check_combination, effective, least_staleness, tokens_allow
from forge_async.replay.lanes import Lanes
from forge_async.replay.settings import AsyncSettings


def bound(age: int, window: int, num: int, every: int = 1) -> Bound:
    return Bound(max_staleness=age, window=window, groups_per_step=num, publish_every=every)


def legal(age: int, window: int, num: int, every: int) -> bool:
    try:
        check_combination(age, window, num, every)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("age", range(5))
@pytest.mark.parametrize("every", range(1, 6))
def test_a_combination_is_legal_exactly_if_the_next_batch_always_fits(age: int, every: int) -> None:
    for num in range(1, 5):
        for window in range(1, 25):
            depth = (age + 1) * num - (window - 1)
            worst_unpulled_steps = every - 1
            fits = all(untaken + num * worst_unpulled_steps < depth for untaken in range(num))
            assert legal(age, window, num, every) == fits


@pytest.mark.parametrize("age", range(4))
def test_no_group_admitted_within_room_can_grow_older_than_the_bound(age: int) -> None:
    for num in range(1, 4):
        for window in range(1, age * num + 2):
            one = bound(age, window, num)
            for ahead in range(20):
                for unpulled in range(5):
                    if one.room(ahead, unpulled) > 0:
                        assert unpulled + (ahead + window - 1) // num <= age


def test_the_bound_is_reached_so_depth_is_not_smaller_than_needed() -> None:
    one = bound(2, 3, 4)
    ahead = one.depth - 1
    assert one.room(ahead, 0) == 1 and (ahead + one.window - 1) // one.groups_per_step == 2


def test_publishing_more_rarely_than_the_bound_allows_names_both_remedies() -> None:
    with pytest.raises(ConfigError, match=r"set async.max_staleness=3 or more, or async.publish_every=2 or less"):
        effective(AsyncSettings(max_staleness=1, publish_every=4), 8)


def test_a_window_that_leaves_no_room_names_the_widest_one() -> None:
    with pytest.raises(ConfigError, match=r"set async.window=9 or less"):
        effective(AsyncSettings(max_staleness=2, publish_every=2, window=10), 8)


def test_presets_set_age_and_window() -> None:
    given: dict[str, Any] = {"max_staleness": 3, "window": 4}
    assert effective(AsyncSettings(buffer="none", **given), 8) == bound(0, 1, 8)
    assert effective(AsyncSettings(buffer="double", **given), 8) == bound(1, 1, 8)
    assert effective(AsyncSettings(buffer="bounded", **given), 8) == bound(3, 4, 8)
    stream = effective(AsyncSettings(buffer="stream", **given), 8)
    assert not stream.bounded and stream.room(10**9, 10**6) > 0 and stream.window == UNLIMITED


def test_a_preset_that_publishing_contradicts_is_refused() -> None:
    with pytest.raises(ConfigError, match="publish_every=2"):
        effective(AsyncSettings(buffer="none", publish_every=2), 8)


def test_stream_needs_a_correction_even_when_forced() -> None:
    with pytest.raises(ConfigError, match="correction"):
        effective(AsyncSettings(buffer="stream", correction="none", force_uncorrected=True), 8)


def test_reweighting_needs_a_correction() -> None:
    with pytest.raises(ConfigError, match=r"async.on_stale=reweight .* async.correction=none"):
        effective(AsyncSettings(on_stale="reweight", correction="none", max_staleness=0), 8)


def test_strict_order_with_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="async.order=fifo"):
        effective(AsyncSettings(order="fifo", window=2), 8)


@pytest.mark.parametrize(
    ("dials", "num", "words"),
    [
        ({"fresh_fraction": 0.01}, 8, r"less than half a group of groups_per_step=8; set it to 0.125 or more"),
        ({"fresh_fraction": 0.99}, 8, r"leaves no group .* set async.max_staleness=0 and async.fresh_fraction=0"),
        ({"fresh_fraction": 0.5, "publish_every": 2}, 8, r"async.publish_every=2 does not go with it"),
        ({"fresh_fraction": 0.5, "max_staleness": 0}, 8, r"does nothing at max_staleness=0"),
        ({"fresh_fraction": 0.5, "buffer": "none"}, 8, r"does nothing at max_staleness=0"),
        ({"fresh_fraction": 0.5, "max_staleness": 1, "window": 6}, 8, r"set async.window=5 or less"),
    ],
)
def test_a_fresh_share_that_cannot_work_is_refused(dials, num: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Lanes.of(AsyncSettings(**dials), num)


def test_a_fresh_share_has_a_lane_of_its_own_beside_the_rest() -> None:
    lanes = Lanes.of(AsyncSettings(fresh_fraction=0.3, max_staleness=3), 8)
    assert lanes.fresh and (lanes.fresh.bound, lanes.normal.bound) == (bound(0, 1, 2), bound(3, 1, 6))
    assert [lane.fresh for lane in lanes] == [True, False] and lanes.groups_per_step == 8 and lanes.depth == 26


@pytest.mark.parametrize("every", range(1, 4))
def test_the_least_staleness_is_the_least_legal_one(every: int) -> None:
    for window in range(1, 12):
        for num in range(1, 5):
            least = least_staleness(window, num, every)
            assert legal(least, window, num, every) and (least == 1 or not legal(least - 1, window, num, every))


def test_auto_begins_between_the_least_and_the_cap() -> None:
    def begin(**dials) -> int:
        return effective(AsyncSettings(max_staleness="auto", **dials), 4).max_staleness

    assert (begin(), begin(max_staleness_cap=1), begin(window=13), begin(publish_every=5)) == (2, 1, 3, 4)
    with pytest.raises(ConfigError, match="max_staleness_cap=2 is below 3"):
        begin(window=13, max_staleness_cap=2)


def test_the_bound_cannot_move_to_what_leaves_no_room() -> None:
    lanes = Lanes.of(AsyncSettings(max_staleness="auto", window=9), 4)
    assert lanes.with_max_staleness(3).normal.bound == bound(3, 9, 4)
    with pytest.raises(ConfigError, match="async.window=9"):
        lanes.with_max_staleness(1)
    with pytest.raises(ConfigError, match="fresh_fraction"):
        Lanes.of(AsyncSettings(fresh_fraction=0.5), 4).with_max_staleness(0)
    with pytest.raises(ConfigError, match="stream"):
        Lanes.of(AsyncSettings(buffer="stream"), 4).with_max_staleness(1)


def test_only_multiples_of_the_interval_are_published() -> None:
    assert [step for step in range(7) if bound(2, 1, 4, every=3).publishes(step)] == [0, 3, 6]


def test_an_oversize_group_is_admitted_alone_and_the_next_batch_is_never_held_back() -> None:
    assert tokens_allow(0, 0, 500, 100, 1)
    assert not tokens_allow(1, 500, 10, 100, 1)
    assert tokens_allow(3, 500, 10, 100, 4)
    assert tokens_allow(4, 90, 10, 100, 4) and not tokens_allow(4, 91, 10, 100, 4)
