"""Loading user reward functions: what works, and one sentence for what does not."""

from pathlib import Path

import pytest

from forge_async.core.errors import ConfigError
from forge_async.core.user_code import absolute_reference
from forge_async.reward.functions import load_function


def write(folder, text, name="my_reward.py"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_function_of_a_file_is_loaded_and_imports_its_neighbours(tmp_path):
    write(tmp_path, "HALF = 0.5\n", "reward_neighbour.py")
    path = write(tmp_path, "from reward_neighbour import HALF\ndef score(prompt, completion): return HALF\n")
    function = load_function(f"{path}:score")
    assert function.call(**function.arguments("p", "c", {}, False)) == 0.5
    assert not function.is_async


def test_a_function_of_a_module_is_loaded(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert load_function("user_rewards:exact").accepts == {"prompt", "completion", "answer"}


def test_only_accepted_parameters_are_passed(tmp_path):
    path = write(tmp_path, "def score(completion, answer, tolerance=0): pass\n")
    function = load_function(f"{path}:score")
    assert function.arguments("p", "c", {"answer": "4", "level": 2}, True) == {"completion": "c", "answer": "4"}


def test_a_function_with_any_keywords_gets_everything(tmp_path):
    path = write(tmp_path, "def score(prompt, completion, **data): pass\n")
    expected = {"prompt": "p", "completion": "c", "truncated": True, "level": 2}
    assert load_function(f"{path}:score").arguments("p", "c", {"level": 2, "prompt": "not this"}, True) == expected


def test_missing_names_the_fields_that_the_data_lacks(tmp_path):
    path = write(tmp_path, "def score(prompt, completion, answer, level, weight=1): pass\n")
    assert load_function(f"{path}:score").missing({"level": 1}) == ["answer"]


def test_async_functions_and_callable_objects_are_recognised(tmp_path):
    text = "async def slow(completion): pass\n"
    text += "class Judge:\n    async def __call__(self, completion): pass\njudge = Judge()\n"
    path = write(tmp_path, text)
    assert load_function(f"{path}:slow").is_async
    assert load_function(f"{path}:judge").is_async


def test_references_to_files_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_reference("my.py:score") == f"{tmp_path}/my.py:score"
    assert absolute_reference("package.module:score") == "package.module:score"


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        ("def score(completion): pass", "scor", "has no function scor; did you mean score"),
        ("def judge(completion): pass", "score", "has no function score; it has judge"),
        ("score = 3", "score", "score is a int, not a function"),
        ("def score(text): pass", "score", r"takes \(text\) but must take a parameter named completion"),
        ("import no_such_thing", "score", "cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("raise SystemExit(3)", "score", "cannot be imported: SystemExit: 3"),
        ("def score(:", "score", "cannot be imported: SyntaxError"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, source, function, message):
    path = write(tmp_path, source)
    with pytest.raises(ConfigError, match=message) as caught:
        load_function(f"{path}:{function}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("score", "does not name a function: write package.module:function or file.py:function"),
        ("my.py:", "does not name a function"),
        ("/no/such/my.py:score", "reward file /no/such/my.py does not exist"),
        ("no_such_package.rewards:score", "module no_such_package.rewards cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_bad_reference_is_refused_in_one_sentence(reference, message):
    with pytest.raises(ConfigError, match=message):
        load_function(reference)
