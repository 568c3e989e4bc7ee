import pytest

from forge_async.core import errors
from forge_async.core.errors import ConfigError, ForgeError, RewardError, one_sentence, unwrap


def test_our_own_error_is_found_inside_nested_groups():
    ours = RewardError("my.py:score raised.")
    inner = ExceptionGroup("inner", [KeyError("x"), ours])
    assert unwrap(ExceptionGroup("outer", [ValueError("y"), inner])) is ours


def test_without_one_of_ours_the_first_error_speaks():
    first = ValueError("y")
    assert unwrap(ExceptionGroup("outer", [ExceptionGroup("inner", [first]), KeyError("x")])) is first
    assert unwrap(first) is first


def test_a_failed_run_ends_with_one_line():
    assert one_sentence(ConfigError("seed=x is not\n  a number.")) == "seed=x is not a number."
    assert one_sentence(KeyError("x")) == "KeyError: 'x'"
    assert one_sentence(ValueError()) == "ValueError: no message"
    assert one_sentence(BaseExceptionGroup("g", [KeyboardInterrupt(), ForgeError("it broke.")])) == "it broke."


def test_only_what_the_user_can_mend_beforehand_exits_with_2():
    codes = {cls.__name__: cls.exit_code for cls in vars(errors).values() if isinstance(cls, type)}
    assert {name for name, code in codes.items() if code == 2} == {"ConfigError", "MissingPackageError"}
    assert set(codes.values()) == {1, 2}


@pytest.mark.parametrize("child", [errors.NonFiniteError, errors.FingerprintError, errors.StallError])
def test_every_error_is_of_one_tree(child):
    assert issubclass(child, ForgeError)
