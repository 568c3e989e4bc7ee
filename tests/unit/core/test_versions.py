import pytest

from forge_async.core.errors import ForgeError
from forge_async.core.versions import NOT_SAMPLED, PolicyVersion, VersionRuns


@pytest.mark.parametrize(
    "text", ["", "policy", "policy@", "policy@1", "policy@.1", "policy@1.", "policy@-1.2", "p@1.2.3"]
)
def test_what_is_not_a_version_is_refused_by_its_text(text):
    with pytest.raises(ForgeError, match="name@incarnation.step"):
        PolicyVersion.parse(text)


def test_versions_order_by_incarnation_before_step():
    dead, restored = PolicyVersion(incarnation=0, step=9), PolicyVersion(incarnation=1, step=3)
    assert dead < restored < restored.next()
    assert restored.next() == PolicyVersion(incarnation=1, step=4)


def test_only_versions_of_one_policy_precede_each_other():
    old, new = PolicyVersion(incarnation=0, step=9), PolicyVersion(incarnation=1, step=3)
    assert (old.precedes(new), new.precedes(old), old.precedes(old)) == (True, False, False)
    another = PolicyVersion(policy="another", incarnation=0, step=1)
    assert not another.precedes(new) and not new.precedes(another)


def test_equal_neighbours_join_and_empty_runs_vanish():
    runs = VersionRuns.of([(2, 5, 0), (0, 6, 0), (3, 5, 0), (1, 5, 1)])
    assert runs.lengths.tolist() == [5, 1]
    assert runs.steps.tolist() == [5, 5]
    assert runs.incarnations.tolist() == [0, 1]


def test_a_run_of_negative_length_is_refused():
    with pytest.raises(ForgeError, match="-1 tokens"):
        VersionRuns.of([(-1, 0, 0)])


def test_the_oldest_step_leaves_prompts_aside():
    assert VersionRuns.of([(4, NOT_SAMPLED, 0), (2, 7, 0), (1, 8, 0)]).oldest_step() == 7
    assert VersionRuns.of([(4, NOT_SAMPLED, 0)]).oldest_step() is None
    assert VersionRuns.concat([]).oldest_step() is None
