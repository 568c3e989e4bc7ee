import pytest

from forge_async.pipeline.parity_alarm import ParityAlarm, default_limit

FIGURE = "mismatch/fresh_logprob_diff_max"


def warnings_of(limit, *figures):
    told = []
    alarm = ParityAlarm(limit, told.append)
    for step, figure in enumerate(figures, start=1):
        alarm.look({"step": step} | ({} if figure is None else {FIGURE: figure}))
    return told


def test_the_first_figure_above_the_limit_is_told_and_no_other():
    told = warnings_of(1e-3, 1e-5, 1e-3, None, 0.02, 0.5)
    assert len(told) == 1
    assert told[0].startswith(f"step 4: {FIGURE}=0.02 is above run.parity_alarm=0.001: ")
    assert "doctor parity" in told[0] and "\n" not in told[0]


def test_what_is_not_a_number_is_told():
    assert len(warnings_of(0.2, float("nan"))) == 1


def test_old_tokens_alone_never_ring():
    assert warnings_of(1e-3, None, None) == []


@pytest.mark.parametrize(
    ("dtypes", "limit"),
    [(("float32", "float32"), 1e-3), (("bfloat16", "float32"), 0.2), (("float32", "bfloat16"), 0.2)],
)
def test_the_limit_follows_what_is_computed_in(dtypes, limit):
    assert default_limit(*dtypes) == limit


def test_a_quantised_engine_has_a_limit_of_its_own_elsewhere():
    assert warnings_of(default_limit("float32", "float32", is_quantized=True), 5.0) == []
