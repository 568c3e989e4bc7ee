from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.versions import PolicyVersion
from forge_async.weights.retention import Retention


def version(step, incarnation=0):
    return PolicyVersion(step=step, incarnation=incarnation)


def test_a_leased_version_stays_until_its_last_reader_ends():
    retention = Retention(1)
    for step in range(3):
        retention.published(version(step))
    retention.lease(version(0))
    retention.lease(version(0))
    assert retention.take_deletable() == [version(1)]
    retention.release(version(0))
    assert retention.take_deletable() == []
    retention.release(version(0))
    assert retention.take_deletable() == [version(0)]
    assert retention.newest == version(2)


def test_a_new_incarnation_is_newer_than_what_a_dead_one_published():
    retention = Retention(1)
    retention.published(version(9))
    retention.published(version(3, incarnation=1))
    assert retention.newest == version(3, incarnation=1)
    assert retention.take_deletable() == [version(9)]


def test_nothing_published_is_nothing_to_serve_or_delete():
    retention = Retention(2)
    assert retention.newest is None
    assert retention.take_deletable() == []


def test_what_a_kept_or_leased_version_is_built_on_stays_with_it():
    retention = Retention(1)
    retention.published(version(0))
    retention.published(version(1), frozenset({version(0)}))
    retention.published(version(2), frozenset({version(0), version(1)}))
    assert retention.take_deletable() == []
    retention.lease(version(1))
    retention.published(version(3))
    assert retention.take_deletable() == [version(2)]
    retention.release(version(1))
    assert retention.take_deletable() == [version(1), version(0)], "what builds on another goes before it"


def test_before_another_comes_all_that_it_will_supersede_but_the_newest_may_go():
    retention = Retention(3)
    for step in range(3):
        retention.published(version(step))
    assert retention.take_deletable() == []
    assert retention.take_deletable(coming=1) == [version(0)]
    assert retention.take_deletable(coming=9) == [version(1)], "until another is there, somebody may read the newest"
    assert Retention(1).take_deletable(coming=1) == []


def test_before_another_comes_what_the_newest_is_built_on_stays_since_it_may_build_on_it_too():
    retention = Retention(2)
    for step in range(3):
        retention.published(version(step), frozenset(map(version, range(step))))
    assert retention.take_deletable(coming=1) == []
    retention.lease(version(0))
    retention.published(version(3))
    assert retention.take_deletable(coming=1) == [version(2), version(1)]


def test_a_version_that_is_published_again_whole_needs_nothing_any_more():
    retention = Retention(1)
    retention.published(version(0))
    retention.published(version(1), frozenset({version(0)}))
    assert not retention.is_whole(version(1))
    retention.published(version(1))
    assert retention.is_whole(version(1))
    assert retention.take_deletable() == [version(0)]


actions = st.lists(
    st.tuples(st.sampled_from(("publish", "lease", "release", "take", "take before")), st.integers(0, 9)), max_size=60
)


@given(actions, st.integers(1, 4))
def test_readers_and_the_newest_are_never_robbed_and_nothing_is_deleted_twice(actions, keep):
    retention, leases, deleted, num_published = Retention(keep), [], [], 0
    for action, choice in actions:
        live = [step for step in range(num_published) if step not in deleted]
        if action == "publish":
            retention.published(version(num_published))
            num_published += 1
        elif action == "lease" and live:
            leases.append(live[choice % len(live)])
            retention.lease(version(leases[-1]))
        elif action == "release" and leases:
            retention.release(version(leases.pop(choice % len(leases))))
        elif action == "take":
            taken = [old.step for old in retention.take_deletable()]
            assert taken == [step for step in reversed(live[:-keep]) if step not in leases]
            deleted += taken
        elif action == "take before":
            taken = [old.step for old in retention.take_deletable(coming=1)]
            assert taken == [step for step in reversed(live[: -max(keep - 1, 1)]) if step not in leases]
            deleted += taken
    assert len(set(deleted)) == len(deleted)


def test_what_was_lost_with_its_store_is_neither_there_nor_deleted():
    retention = Retention(keep=1)
    for step in range(2):
        retention.published(PolicyVersion(step=step))
    retention.lease(PolicyVersion(step=0))
    retention.lost()
    assert retention.newest is None and not retention.holds(PolicyVersion(step=1))
    retention.published(PolicyVersion(step=1))
    retention.release(PolicyVersion(step=0))
    assert retention.take_deletable() == []
    assert retention.holds(PolicyVersion(step=1))
