"""`apps.check reward`: verdicts, exit codes, and no traceback."""

import pytest

from forge_async.apps.check import main

GOOD = "def score(prompt, completion, **data): return float('42' in completion)\n"


@pytest.fixture
def check(tmp_path, capsys):
    def run(source, *arguments, function="score"):
        (tmp_path / "my.py").write_text(source)
        code = main(["reward", f"{tmp_path}/my.py:{function}", *arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


def test_a_good_reward_is_fit(check):
    code, out, err = check(GOOD)
    assert (code, err) == (0, "")
    assert "Verdict: fit for a run." in out
    assert "0 to 1" in out
    assert "p95" in out
    assert len(out.splitlines()) == 6


def test_fields_of_the_prompts_file_are_given_to_the_function(check, tmp_path):
    source = "def score(completion, answer): return float(completion == answer)\n"
    code, _, err = check(source)
    assert code == 2
    assert "needs answer" in err
    assert "Give --prompts FILE" in err
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    code, out, _ = check(source, "--prompts", str(tmp_path / "data.jsonl"))
    assert code == 0
    assert "0 to 1" in out


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("import random\ndef score(completion): return random.random()\n", "determinism   NOT OK"),
        ("seen = []\ndef score(completion):\n    seen.append(0)\n    return len(seen)\n", "in one process"),
        ("def score(completion): return hash(completion) % 1000\n", "in another process"),
        ("def score(completion): return 1 / len(completion)\n", "raised 3; on empty: .*ZeroDivisionError"),
        ("def score(completion): return float('nan')\n", "not_a_number .* return a finite float"),
        ("def score(completion, truncated): return None if truncated else 1\n", "not_a_number 3; on truncated"),
        ("import os\ndef score(completion): return 1 if completion else os._exit(3)\n", "died 3; on empty"),
    ],
)
def test_a_bad_reward_is_not_fit_and_the_reason_is_shown(check, source, shown):
    code, out, _ = check(source)
    assert code == 1
    assert "Verdict: not fit for a run" in out
    assert pytest.importorskip("re").search(shown, out), out


def test_a_reward_that_hangs_is_named_after_one_deadline(check):
    code, out, _ = check("import time\ndef score(completion): time.sleep(600)\n", "--timeout-s", "0.1")
    assert code == 1
    assert "hung 1; on empty: " in out
    assert "did not answer in 0.1 s" in out


def test_equal_rewards_are_remarked_on(check):
    code, out, _ = check("def score(completion): return 0\n")
    assert code == 0
    assert "all equal" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required"),
        (["penalty", "a:b"], "invalid choice: 'penalty'"),
        (["reward", "no_colon"], "does not name a function"),
        (["reward", "/none.py:score"], "reward file /none.py does not exist"),
        (["reward", "a:b", "--prompts", "/none.jsonl"], "prompts=/none.jsonl cannot be read"),
        (["reward", "a:b", "--timeout-s", "0"], "must be more than 0"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(capsys, arguments, message):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
