"""Who takes part in the broadcasts of one sender."""

from __future__ import annotations

from forge_async.weights.audience import Audience


def test_a_group_holds_until_somebody_joins_goes_or_breaks_it():
    audience = Audience()
    assert (audience.members, audience.has_group, list(audience.unknown(2))) == ((), False, [1, 2])
    audience.add(1)
    audience.add(2)
    audience.formed()
    assert audience.has_group
    assert list(audience.unknown(3)) == [3]
    audience.add(3)
    assert not audience.has_group
    audience.formed()
    audience.drop([2])
    assert (audience.members, audience.has_group) == ((1, 3), False)
    audience.formed()
    audience.broke()
    assert not audience.has_group


def test_who_was_dropped_is_not_taken_for_a_new_member():
    audience = Audience()
    audience.add(1)
    audience.drop([1])
    audience.drop([1])
    assert list(audience.unknown(1)) == []
    audience.add(2)
    assert audience.members == (2,)
