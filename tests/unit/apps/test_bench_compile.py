"""`bench compile`: the arithmetic of its rows."""

import pytest

from forge_async.apps.bench.__main__ import parse
from forge_async.apps.bench.compiling import CASES, Timing, _in_turn, _told, row_of
from forge_async.apps.bench.engine_runs import Cost
from forge_async.core.errors import ConfigError


def timing(warm_s, *steps_s):
    return Timing(Cost(warm_s, 2 * warm_s), [Cost(each, each / 2) for each in steps_s])


def test_steps_to_break_even_are_what_compiling_costs_over_what_a_step_gains():
    row = row_of("learner/tokens=256", timing(3.0, 0.3, 0.2, 0.9), timing(33.0, 0.1, 0.2, 0.0))
    assert row["eager_step_s"] == 0.3 and row["compiled_step_s"] == 0.1, "medians"
    assert row["speedup"] == pytest.approx(3) and row["compile_s"] == 30
    assert row["break_even_steps"] == 150
    assert row["compile_cpu_s"] == 60 and row["break_even_cpu_steps"] == 600
    assert "3.00 times the rate for 30 s of compiling, which pays after 150 steps" in _told(row)


def test_what_is_slower_when_compiled_never_pays():
    row = row_of("policy/tokens=1", timing(1.0, 0.1), timing(9.0, 0.2))
    assert row["speedup"] == 0.5 and "break_even_steps" not in row
    assert _told(row).endswith("which never pays.")


def test_a_compiled_start_that_is_no_longer_costs_nothing():
    row = row_of("learner/tokens=256", timing(3.0, 0.2), timing(2.0, 0.1))
    assert row["compile_s"] == 0 and "break_even_steps" not in row
    assert "too noisy to time" in _told(row)


def test_cases_take_turns_and_the_first_steps_are_counted_as_their_start():
    calls = []
    row = _in_turn("x", {name: lambda name=name: calls.append(name) for name in CASES}, rounds=2)
    assert calls == ["eager", "compiled"] * 5, "three to warm up, then two rounds"
    assert row["case"] == "x" and row["eager_step_s"] > 0


def test_its_parts_can_be_measured_alone():
    assert parse(["compile", "--only", "policy"]).only == "policy"
    with pytest.raises(ConfigError, match="there are learner, policy"):
        parse(["compile", "--only", "replay"])
