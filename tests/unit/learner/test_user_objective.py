"""An objective of the user's own: found, called, and refused with one sentence."""

import math
from pathlib import Path

import pytest

from forge_async.core.errors import ConfigError, LearnerError
from forge_async.core.user_code import absolute_reference
from forge_async.learner.figures import step_figures
from forge_async.learner.loss import objective_loss
from forge_async.learner.objectives.user import load_objective
from forge_async.learner.settings import ObjectiveSettings
from tests.unit.learner.micro import counts_of, one_row, random_inputs

FILE = str(Path(__file__).with_name("user_objectives.py"))
DOCS = Path(__file__).parents[3] / "docs" / "objectives.md"


def loss_of(reference, inputs):
    return objective_loss(ObjectiveSettings(name=reference), "token_is")(inputs, counts_of(inputs))


@pytest.mark.parametrize("place", [FILE, "tests.unit.learner.user_objectives"])
def test_a_function_in_a_file_or_a_module_is_the_objective(place):
    inputs = one_row([2.0, 1.0], [1.0, -1.0])
    terms = loss_of(f"{place}:squared", inputs)
    terms.loss.backward()
    log2 = math.log(2)
    assert float(terms.loss.detach()) == pytest.approx((-2 + 0.5 * log2**2 + 1) / 2)
    assert inputs.logprobs.grad[0].tolist() == pytest.approx([(-2 + log2) / 2, 0.5])
    assert float(terms.sums["clipped"]) == 0


def test_it_may_say_what_it_clipped_and_measure_more():
    inputs = one_row([4.0, 1.0, 9.0], [1.0, 1.0, 0.0], mask=[1, 1, 0])
    terms = loss_of(f"{FILE}:with_clip_figure", inputs)
    assert float(terms.sums["clipped"]) == 1
    sums, maxima = ({name: float(v) for name, v in each.items()} for each in (terms.sums, terms.maxima))
    assert step_figures(sums, maxima, counts_of(inputs))["objective/root"] == pytest.approx((2 + 1) / 2)


@pytest.mark.parametrize(
    ("reference", "part"),
    [
        (f"{FILE}:nothing", "has no function nothing"),
        (f"{FILE}:NOT_A_FUNCTION", "NOT_A_FUNCTION is a "),
        ("absent.py:loss", "objective.name file absent.py does not exist"),
        ("absent_package.module:loss", "cannot be imported: ModuleNotFoundError: No module named"),
        (f"{FILE}:one_argument", "must take two arguments: write def one_argument(inputs: LossInputs"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(reference, part):
    with pytest.raises(ConfigError) as caught:
        load_objective(reference)
    text = str(caught.value)
    assert part in text and reference.rpartition(":")[0] in text and "\n" not in text


def test_a_file_that_fails_is_named_with_its_error(tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no GPU here')\n")
    with pytest.raises(ConfigError, match=r"file .*broken.py cannot be imported: RuntimeError: no GPU here"):
        load_objective(f"{tmp_path}/broken.py:loss")


def test_a_result_of_another_shape_is_named():
    with pytest.raises(LearnerError, match=r"summed returned Tensor of shape \(\); it must return .*\(3, 12\)"):
        loss_of(f"{FILE}:summed", random_inputs())


def test_references_to_files_survive_a_change_of_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_reference("mine.py:loss") == f"{tmp_path}/mine.py:loss"
    assert absolute_reference("package.module:loss") == "package.module:loss"
    assert absolute_reference("grpo") == "grpo"


def test_the_documented_example_runs(tmp_path):
    text = DOCS.read_text()
    code = text[text.index("```python\n") + len("```python\n") :].partition("```")[0]
    (tmp_path / "my_loss.py").write_text(code)
    inputs = random_inputs()
    terms = loss_of(f"{tmp_path}/my_loss.py:my_loss", inputs)
    terms.loss.backward()
    assert float(inputs.logprobs.grad.norm()) > 0
