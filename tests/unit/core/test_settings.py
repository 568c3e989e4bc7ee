import math
from dataclasses import dataclass

import pytest

from forge_async.core.errors import ConfigError
from forge_async.core.settings import check_ranges, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Dials:
    lr: float = setting(1e-3, "learning rate", low=0.0)
    window: int = setting(2, "look-ahead", unit="groups", low=1, high=8)
    swap: str = setting("keep_kv", "how", choices=("keep_kv", "drain"))
    flag: bool = setting(True, "yes or no", low=5)
    names: list = setting(["a"], "names")


def test_the_ends_of_a_range_belong_to_it():
    check_ranges(Dials())
    check_ranges(Dials(lr=0.0, window=1))
    check_ranges(Dials(window=8))


@pytest.mark.parametrize(
    ("dials", "sentence"),
    [
        (Dials(window=0), "async.window=0 is below its least value 1 groups; give 1 or more."),
        (Dials(window=9), "async.window=9 is above its greatest value 8 groups; give 8 or less."),
        (Dials(lr=-1e-9), "async.lr=-1e-09 is below its least value 0; give 0 or more."),
        (Dials(lr=math.nan), "async.lr=nan is not a number."),
        (Dials(swap="stop"), "async.swap=stop is not one of keep_kv, drain."),
    ],
)
def test_what_lies_outside_is_refused_in_one_sentence(dials, sentence):
    with pytest.raises(ConfigError) as caught:
        check_ranges(dials, "async.")
    assert str(caught.value) == sentence


def test_each_instance_has_a_list_of_its_own():
    one, other = Dials(), Dials()
    one.names.append("b")
    assert other.names == ["a"]
