"""`bench objectives`: its cases, arithmetic, file of finished runs and pictures; the runs themselves are fakes."""

import json
import math
from statistics import stdev
from xml.etree import ElementTree

import pytest

from forge_async.apps.bench import objectives
from forge_async.apps.bench.__main__ import main, parse
from forge_async.apps.bench.objectives import case_figures, cases, pair_figures, reward_final, steps_to_target
from forge_async.apps.bench.objectives_picture import curves, dots
from forge_async.apps.bench.paired import T95, paired_difference
from forge_async.apps.bench.results_file import ResultsFile, run_key
from forge_async.config import Config, load
from forge_async.core.errors import ConfigError
from forge_async.learner.settings import OBJECTIVES
from forge_async.replay.settings import CORRECTIONS


def record(*rewards, **more):
    return {"key": str(rewards), "rewards": list(rewards), "held_out_sampled": rewards[-1], "cpu_s": 2.0} | more


def test_every_objective_correction_and_bound_is_a_case_that_can_run():
    assert [case.name for case in cases("objectives")] == [f"objective/{name}" for name in OBJECTIVES]
    assert [case.name for case in cases("corrections")] == [f"correction/{name}" for name in CORRECTIONS]
    assert [case.name for case in cases("staleness")] == ["S=0", "S=1", "S=2", "S=4", "S=8"]
    for part in objectives.PARTS:
        for case in cases(part):
            config, _ = load([*objectives.TASK, *case.words])
            assert config.value("groups_per_step") == 32


def test_one_factor_is_varied_at_a_time():
    plain, _ = load(objectives.TASK)
    for part in ("objectives", "corrections", "staleness"):
        same = [case.name for case in cases(part) if load([*objectives.TASK, *case.words])[0] == plain]
        assert len(same) == 1, "the default objective is a case of every table"
    changed, _ = load([*objectives.TASK, *cases("corrections")[1].words])
    assert changed.replace({"async.correction": "token_is", "async.force_uncorrected": False}) == plain


def test_the_interval_of_paired_differences_is_students():
    differences = [1.0, 2.0, 4.0, 5.0]
    half = 3.1824 * stdev(differences) / 2
    assert paired_difference(differences) == pytest.approx((3.0, 3.0 - half, 3.0 + half))
    assert paired_difference([2.5]) == (2.5, -math.inf, math.inf)
    assert paired_difference([0.0] * 40) == (0, 0, 0)


def test_the_quantiles_are_those_of_the_t_distribution():
    """The tail beyond each, by integrating the density with Simpson's rule."""
    for freedom in (1, 2, 9, 29, 30):
        limit = T95[freedom - 1]
        scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
        points = [limit * at / 2000 for at in range(2001)]
        density = [scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2) for x in points]
        inside = limit / 6000 * (density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2]))
        assert 0.5 - inside == pytest.approx(0.025, abs=2e-6), freedom


def test_steps_to_target_are_counted_on_a_mean():
    assert steps_to_target([0.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == 6
    assert steps_to_target([0.9] * 5) == 5
    assert steps_to_target([1.0, 0.0] * 10) is None


def test_a_cases_figures_are_means_over_seeds():
    figures = case_figures([record(*[0.5] * 10), record(*[0.9] * 10)])
    assert figures["reward_last"] == figures["reward_first"] == pytest.approx(0.7)
    assert (figures["reward_last_min"], figures["reward_last_max"]) == pytest.approx((0.5, 0.9))
    assert "steps_to_target" not in figures, "half of the seeds did not get there"
    assert figures["seeds"] == 2 and figures["cpu_s"] == 2.0
    assert case_figures([record(*[0.9] * 10)] * 2)["steps_to_target"] == 5


def test_pairs_are_compared_seed_by_seed_in_points():
    pairs = [(record(0.9), record(0.8)), (record(0.5), record(0.42)), (record(0.1), record(0.04))]
    figures = pair_figures(pairs)
    mean, low, high = paired_difference([10.0, 8.0, 6.0])
    assert figures["reward_final_points"] == pytest.approx(mean) == pytest.approx(8.0)
    assert (figures["reward_final_low_points"], figures["reward_final_high_points"]) == pytest.approx((low, high))
    assert figures["held_out_sampled_points"] == pytest.approx(8.0)
    without = pair_figures([(record(0.9, held_out_sampled=None), record(0.8, held_out_sampled=None))])
    assert "held_out_sampled_points" not in without


@pytest.mark.parametrize(("num_steps", "num_last"), [(3, 1), (10, 2), (150, 30), (260, 40), (1000, 40)])
def test_the_final_reward_is_a_mean_over_the_end_of_the_run(num_steps, num_last):
    rewards = [float(number) for number in range(num_steps)]
    assert reward_final(record(*rewards)) == pytest.approx(sum(rewards[-num_last:]) / num_last)


def test_a_key_tells_what_changes_a_result_and_nothing_else():
    key = run_key(Config(), "model", "code")
    assert run_key(Config().replace({"run.dir": "elsewhere", "job.name": "x"}), "model", "code") == key
    others = [
        run_key(Config().replace({"optimizer.lr": 1e-3}), "model", "code"),
        run_key(Config().replace({"seed": 1}), "model", "code"),
        run_key(Config(), "another", "code"),
        run_key(Config(), "model", "another"),
    ]
    assert len({key, *others}) == 5


def test_results_are_there_after_a_restart_and_other_files_are_refused(tmp_path):
    path = tmp_path / "deep" / "runs.json"
    ResultsFile(path).add(record(0.5))
    again = ResultsFile(path)
    assert str((0.5,)) in again and again[str((0.5,))]["rewards"] == [0.5]
    path.write_text("[]")
    with pytest.raises(ConfigError, match="--out .*runs.json holds no runs"):
        ResultsFile(path)


class FakeWorker:
    """Runs whose reward says what they were given."""

    done: list[tuple[str, ...]] = []

    def __init__(self, log):
        self.log = log

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, words, model):
        FakeWorker.done.append(words)
        config, _ = load(words)
        reward = 0.9 - 0.01 * config.value("async.max_staleness") + 0.001 * config.root.seed
        return record(*[reward] * config.root.steps)


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(objectives, "RunWorker", FakeWorker)
    monkeypatch.setattr("forge_async.apps.bench.plan.Plan.model_folder", lambda self, config=None: tmp_path / "model")
    FakeWorker.done.clear()
    return tmp_path


def test_runs_are_done_once_and_a_later_call_goes_on(fakes, capsys):
    def call(number, *words):
        folder = fakes / f"call-{number}"
        options = ["--folder", str(folder), "--out", str(fakes / "runs.json"), "--steps", "12", *words]
        assert main(["objectives", *options]) == 0, capsys.readouterr()
        return folder, json.loads((folder / "bench.json").read_text())

    _, report = call(0, "--only", "staleness", "--rounds", "1")
    assert [row["case"] for row in report["rows"]] == ["S=0", "S=1", "S=2", "S=4", "S=8"]
    assert len(FakeWorker.done) == 5
    _, report = call(1, "--only", "pairs", "--pairs", "3")
    assert len(FakeWorker.done) == 5 + 6, "the first seed was at hand"
    two, eight = report["rows"]
    assert two["reward_final_points"] == pytest.approx(-2.0) and eight["reward_final_points"] == pytest.approx(-8.0)
    assert any("S=2 against S=0, 3 paired seeds: final reward -2.00 points" in note for note in report["notes"])
    folder, report = call(2, "--rounds", "1", "--pairs", "3", "--jobs", "3")
    assert len(report["rows"]) == len(OBJECTIVES) + len(CORRECTIONS) + 5 + 2
    assert len(FakeWorker.done) == 11 + (len(OBJECTIVES) - 1) + (len(CORRECTIONS) - 1), "grpo and token_is at hand"
    for name in ("reward_by_staleness.svg", "reward_by_case.svg"):
        ElementTree.parse(folder / name)
    call(3, "--rounds", "1", "--pairs", "3")
    assert len(FakeWorker.done) == 11 + len(OBJECTIVES) + len(CORRECTIONS) - 2


def test_curves_are_smoothed_means_over_seeds():
    picture = curves({"S=0": [[0.0] * 10, [1.0] * 10], "S=2": [[0.5] * 10]})
    assert "S=0 (2) at 5: 0.5" in picture and "S=2 (1) at 10: 0.5" in picture


def test_dots_show_every_seed_and_their_mean():
    ends = {"objective/grpo": [0.5, 0.7], "correction/icepop": [0.6], "S=4": [0.4]}
    root = ElementTree.fromstring(dots(ends))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["objective/grpo: 0.6", "correction/icepop: 0.6", "S=4: 0.4"]
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 3 + 2


def test_a_part_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="--only simulated is no part of objectives: there are objectives, corr"):
        parse(["objectives", "--only", "simulated"])
    with pytest.raises(ConfigError, match="--only pairs is no part of start: start has no parts"):
        parse(["start", "--only", "pairs"])
