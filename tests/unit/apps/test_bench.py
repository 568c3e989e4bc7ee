"""`apps.bench`: the arithmetic of its figures, the shape of its JSON, its table, its command line."""

import json
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from forge_async.apps.bench import deltas, kept_runs, overlap, reshard, simulated, start, swaps, trl, weights
from forge_async.apps.bench.__main__ import BENCHES, ROUNDS_AND_STEPS, main, parse
from forge_async.apps.bench.figures import (
    Stages,
    cpu_figures,
    learner_idle_fraction,
    stages_of,
    steady_rows,
    unaccounted_fraction,
)
from forge_async.apps.bench.output import Report, as_json, machine, print_table, table, write_json
from forge_async.apps.bench.overlap import SAME_WORK
from forge_async.apps.bench.processes import CpuLog
from forge_async.apps.bench.runs import FinishedRun, run_process
from forge_async.apps.bench.trl_environment import fingerprint
from forge_async.config import Config, load
from forge_async.core.errors import ConfigError, ForgeError
from forge_async.replay.settings import BUFFERS, SWAP_MODES

STEPS = 10


def row(step, step_s, *, generate_s=0.2, score_s=0.02, train_s=0.2, publish_s=0.02, pull_s=0.03, wait_s=0.0):
    return {
        "step": step,
        "time_s": 20.0 + step * step_s,
        "step_s": step_s,
        "policy/busy_fraction": generate_s / step_s,
        "reward/busy_fraction": score_s / step_s,
        "learner/busy_fraction": train_s / step_s,
        "learner/wait_data_s": wait_s,
        "weights/publish_s": publish_s,
        "weights/pull_s": pull_s,
        "weights/pause_s": 0.01,
        "staleness/max": 2,
        "staleness/mean": 1.5,
        "policy/discarded_tokens": 8,
        "policy/recomputed_tokens": 16,
        "tokens/generated": 100,
    }


def finished(step_s, *, bound=0, steps=STEPS, **stages):
    """A run that was started at 100 s, began to count at 101 s, and used 0.1 CPU seconds a second for each role."""
    rows = [row(step, step_s, **stages) for step in range(1, steps + 1)]
    cpu = CpuLog()
    for second in range(60):
        roles = ("controller", "replay", "rollout", "store", "other", "reward", "learner", "policy")
        cpu.add(100.0 + second, dict.fromkeys(roles, 0.1 * second))
    summary = {
        "staleness/bound": bound,
        "startup_s": 19.0,
        "startup/learner_s": 15.0,
        "startup/policy_0_s": 18.0,
        "startup/store_s": 12.0,
    }
    events = [{"index": index, "generated_s": 19.5 + index} for index in range(3)] + [{"index": 3, "generated_s": None}]
    return FinishedRun(
        rows=rows, events=events, summary=summary, spawned_s=100.0, begun_s=101.0, ended_s=140.0, cpu=cpu
    )


@pytest.mark.parametrize(
    ("stages", "bound", "ideal_s"),
    [
        ((0.2, 0.02, 0.2, 0.05), 0, 0.47),  # synchronous: the chain
        ((0.2, 0.02, 0.2, 0.05), 1, 0.235),  # two batches in flight: the chain still binds
        ((0.2, 0.02, 0.2, 0.05), 2, 0.2),  # the slowest stage binds
        ((0.1, 0.3, 0.1, 0.0), 3, 0.3),  # scoring may be the slowest
        ((0.1, 0.1, 0.1, 0.9), 2, 0.4),  # weights are in the chain only
    ],
)
def test_the_ideal_is_the_slowest_stage_or_the_chain_over_the_batches_in_flight(stages, bound, ideal_s):
    times = dict(zip(("generate_s", "score_s", "train_s", "sync_s"), stages, strict=True))
    assert Stages(**times).ideal_step_s(bound) == pytest.approx(ideal_s)


def test_stage_times_are_medians_so_that_one_slow_step_does_not_count():
    rows = [row(1, 0.5), row(2, 0.5), row(3, 9.0, generate_s=8.0, publish_s=3.0)]
    stages = stages_of(rows)
    assert stages.generate_s == pytest.approx(0.2)
    assert stages.score_s == pytest.approx(0.02)
    assert stages.train_s == pytest.approx(0.2)
    assert stages.sync_s == pytest.approx(0.05)


def test_first_steps_and_the_last_ones_without_generation_are_left_out():
    assert [r["step"] for r in steady_rows(finished(0.5, bound=0))] == [4, 5, 6, 7, 8, 9, 10]
    assert [r["step"] for r in steady_rows(finished(0.5, bound=2))] == [4, 5, 6, 7, 8]
    with pytest.raises(ForgeError, match="raise --steps"):
        steady_rows(finished(0.5, bound=2, steps=5))


def test_the_learners_time_is_training_waiting_or_unaccounted():
    rows = [row(step, 0.5, train_s=0.2, wait_s=0.25) for step in range(3)]
    assert learner_idle_fraction(rows) == pytest.approx(0.6)
    assert unaccounted_fraction(rows) == pytest.approx(0.1)
    assert unaccounted_fraction([row(1, 0.5, train_s=0.3, wait_s=0.3)]) == 0.0


def test_cpu_seconds_are_interpolated_between_readings():
    log = CpuLog()
    assert log.at("store", 3.0) == 0.0
    log.add(10.0, {"store": 1.0})
    assert log.at("store", 3.0) == log.at("store", 30.0) == 1.0
    log.add(12.0, {"store": 2.0, "learner": 4.0})
    assert [log.at("store", t) for t in (9.0, 10.0, 11.0, 12.0, 13.0)] == [1.0, 1.0, 1.5, 2.0, 2.0]
    assert log.between(10.5, 11.5) == {"store": pytest.approx(0.5), "learner": pytest.approx(2.0)}


def test_cpu_figures_are_a_step_and_the_control_plane_a_share_of_all_cores():
    figures = cpu_figures([finished(0.5), finished(0.5, bound=2)], num_cores=2)
    assert figures["learner_cpu_s"] == figures["reward_cpu_s"] == pytest.approx(0.05)
    assert figures["control_plane_cpu_s"] == pytest.approx(0.25)
    assert figures["control_plane_cpu_fraction"] == pytest.approx(0.25)
    assert figures["cpu_s"] == pytest.approx(0.4)


def overlap_runs(**runs_by_bound):
    cases = {case.name: case for case in overlap.cases("bounds", "keep_kv")}
    return {cases[f"{name}/keep_kv"]: runs for name, runs in runs_by_bound.items()}


def test_overlap_compares_every_case_with_the_same_calls_synchronous_one():
    synchronous, one, two = (
        [finished(0.5)],
        [finished(0.3, bound=1)],
        [finished(0.25, bound=2), finished(0.25, bound=2)],
    )
    report = overlap.report(overlap_runs(**{"S=0": synchronous, "S=1": one, "S=2": two}))
    assert [r["case"] for r in report.rows] == ["real/S=0/keep_kv", "real/S=1/keep_kv", "real/S=2/keep_kv"]
    assert [r["speedup_measured"] for r in report.rows] == pytest.approx([1.0, 5 / 3, 2.0])
    assert [r["fraction_of_ideal"] for r in report.rows] == pytest.approx([0.94, 0.235 / 0.3, 0.8])
    promised = {"step_s", "generate_s", "train_s", "speedup_measured", "fraction_of_ideal", "learner_idle_fraction"}
    assert all(promised | {"unaccounted_fraction", "score_s", "sync_s"} <= set(r) for r in report.rows)
    assert report.rows[0]["generate_over_train"] == pytest.approx(1.0)
    assert report.rows[0]["step_over_chain"] == pytest.approx(0.5 / 0.47)
    assert report.rows[2]["cores_busy_fraction"] == pytest.approx(0.8 / overlap.num_cores())
    assert (report.rows[2]["discarded_tokens"], report.rows[2]["staleness_max"]) == (8, 2)
    assert "OUTSIDE" not in " ".join(report.notes)


def test_overlap_says_when_its_fraction_may_not_be_quoted():
    lopsided = overlap.report(overlap_runs(**{"S=0": [finished(0.9, generate_s=0.5)]}))
    assert "OUTSIDE 0.8..1.25" in lopsided.notes[1]
    assert "OUTSIDE 1.1" in lopsided.notes[2]


def test_the_real_overlap_has_every_bound_swap_and_buffer_each_part_with_its_synchronous_case():
    names = {part: [case.name for case in overlap.cases(part, "drain")] for part in overlap.REAL_PARTS}
    assert names["bounds"] == ["S=0/drain", "S=1/drain", "S=2/drain", "S=4/drain"]
    assert names["swaps"] == ["S=0/drain", *(f"S=2/{mode}" for mode in SWAP_MODES)]
    assert names["buffers"] == ["S=0/drain", *(f"buffer={buffer}/drain" for buffer in BUFFERS)]
    longest = {part: overlap.cases(part, "drain")[-1].words(100)[-1] for part in overlap.REAL_PARTS}
    assert longest == {"bounds": "steps=100", "swaps": "steps=20", "buffers": "steps=20"}
    assert "steps=9" in overlap.cases("swaps", "drain")[0].words(9)
    for part in overlap.REAL_PARTS:
        for case in overlap.cases(part, "drain"):
            loaded = load(case.words(20))[0].asynchrony
            assert (loaded.buffer, loaded.swap) == (case.dials.buffer, case.dials.swap)
            assert loaded.highest_staleness == case.dials.highest_staleness


def test_steps_beside_which_nothing_was_generated_are_left_out_where_no_bound_tells_them():
    run = finished(0.5, bound=None)
    assert [r["step"] for r in steady_rows(run)] == [4, 5, 6, 7, 8, 9, 10]
    for late in run.rows[-3:]:
        late["tokens/generated"] = 0
    assert [r["step"] for r in steady_rows(run)] == [4, 5, 6, 7]


def test_overlap_goes_on_with_the_runs_of_an_earlier_call(monkeypatch, tmp_path):
    began = []

    def begin(words, folder):
        began.append(folder.name)
        return finished(0.5)

    monkeypatch.setattr(kept_runs, "run_grpo", begin)
    words, model = ("async.max_staleness=0",), tmp_path / "model"
    model.mkdir()
    first = kept_runs.KeptRuns(tmp_path / "runs.json", model)
    made = first.run(words, 0, tmp_path / "a")
    assert first.notes == []
    again = kept_runs.KeptRuns(tmp_path / "runs.json", model)
    kept = again.run(words, 0, tmp_path / "b")
    assert began == ["a"], "the second call ran it again"
    assert overlap.report(overlap_runs(**{"S=0": [made]})).rows == overlap.report(overlap_runs(**{"S=0": [kept]})).rows
    assert "1 runs are those of earlier calls" in again.notes[0]
    again.run(words, 1, tmp_path / "another round")
    (model / "model.safetensors").write_bytes(b"another model")
    kept_runs.KeptRuns(tmp_path / "runs.json", model).run(words, 0, tmp_path / "c")
    assert began == ["a", "another round", "c"]


def test_overlap_tells_runs_of_earlier_calls_from_those_that_two_of_its_cases_share(monkeypatch, tmp_path):
    monkeypatch.setattr(kept_runs, "run_grpo", lambda words, folder: finished(0.5))
    model = tmp_path / "model"
    model.mkdir()
    first = kept_runs.KeptRuns(tmp_path / "runs.json", model)
    for case in ("S=2", "buffer=bounded"):
        first.run(("async.max_staleness=2",), 0, tmp_path / case)
    assert first.notes == ["1 runs stand under another case too, whose command line is the same."]
    again = kept_runs.KeptRuns(tmp_path / "runs.json", model)
    for case in ("S=2", "buffer=bounded"):
        again.run(("async.max_staleness=2",), 0, tmp_path / case)
    again.run(("async.max_staleness=4",), 0, tmp_path / "S=4")
    assert [note.split(":")[0] for note in again.notes] == [
        "1 runs are those of earlier calls",
        "1 runs stand under another case too, whose command line is the same.",
    ]


def test_start_counts_from_the_start_of_the_process():
    figures = start.start_figures(finished(0.5))
    assert figures["program_s"] == 1.0
    assert list(figures)[1:4] == ["store_s", "learner_s", "policy_0_s"]
    assert figures["policy_0_s"] == 19.0
    assert figures["first_rollout_s"] == 20.5
    assert figures["first_step_s"] == 21.5
    assert figures["ended_s"] == 40.0
    assert figures["cpu_s"] == pytest.approx(8 * 5.9)
    slower = {name: value + 2 for name, value in figures.items()}
    middle = start.medians([figures, slower, figures | {"extra_s": 1.0}])
    assert middle["runs"] == 3
    assert middle["first_step_s"] == 21.5
    assert "extra_s" not in middle


def test_the_page_cache_is_left_alone_where_it_may_not_be_dropped(monkeypatch, tmp_path):
    monkeypatch.setattr(start.os, "sync", lambda: None)
    monkeypatch.setattr(start, "DROP_CACHES", tmp_path)
    assert start.drop_page_cache() is False
    monkeypatch.setattr(start, "DROP_CACHES", tmp_path / "drop_caches")
    assert start.drop_page_cache() is True


def trl_result(step_s):
    steps = [9.0, 9.0, 9.0, step_s, step_s, step_s]
    return {"step_s": steps, "cpu_s": steps, "startup_s": 7.0, "versions": {"trl": "1.16.0"}}


def test_trl_is_compared_by_the_fastest_of_its_cases():
    times = dict(zip(trl.our_cases([1, 2], groups_per_step=64), (0.4, 0.38, 0.32, 0.2), strict=True))
    ours = {case: [finished(step_s, bound=case.bound)] for case, step_s in times.items()}
    theirs = dict(zip(trl.trl_cases([1, 2], groups_per_step=64), (0.5, 0.44, 0.4), strict=True))
    report = trl.report({case: [trl_result(step_s)] for case, step_s in theirs.items()}, ours)
    assert [r["case"] for r in report.rows] == [
        "trl", "trl/threads=2", "trl/processes=2", "ours/S=0", "ours/S=0/threads=2", "ours/S=0/processes=2", "ours/S=2",
    ]  # fmt: skip
    assert [r["ratio"] for r in report.rows] == pytest.approx([0.8, 0.4 / 0.44, 1.0, 1.0, 0.4 / 0.38, 1.25, 2.0])
    assert [r["step_s"] for r in report.rows] == pytest.approx([0.5, 0.44, 0.4, 0.4, 0.38, 0.32, 0.2])
    assert report.rows[3]["startup_s"] == 20.0


@pytest.mark.parametrize(("threads", "groups", "processes"), [([1], 64, []), ([1, 6], 64, [4]), ([2, 3], 6, [2, 3])])
def test_both_sides_get_as_many_processes_as_threads_where_they_can_share_a_step(threads, groups, processes):
    cases = trl.our_cases(threads, groups)
    assert [case.processes for case in trl.trl_cases(threads, groups) if case.processes > 1] == processes
    assert [case.processes for case in cases if case.processes > 1] == processes
    for case in cases:
        words = (f"groups_per_step={groups}", *SAME_WORK, *case.words())
        config, _ = load(words)
        assert config.learner.ranks == config.policy.replicas == case.processes
        assert config.learner.threads == config.policy.threads == case.threads
        assert config.asynchrony.max_staleness == case.bound


def test_trl_is_given_the_same_work(monkeypatch, tmp_path):
    monkeypatch.setattr(trl, "in_another_process", lambda function, config, model, count: {"num_prompts": count})
    spec = trl.specification(Config.of({"optimizer.lr": 1.0, "groups_per_step": 4}), tmp_path, 7)
    assert spec["num_prompts"] == 28
    assert spec["micro_batch_samples"] == 32
    assert spec["lr"] == 0.0
    json.dumps(spec)


def test_the_environment_of_trl_is_known_by_its_pins_alone():
    lock = "trl==1.0\n    # via -r x.in\ntorch==2\n"
    assert fingerprint(lock, "t") == fingerprint("# comment\n\ntorch==2\ntrl==1.0", "t")
    assert fingerprint(lock, "t") != fingerprint(lock, "u")


def test_the_json_has_bench_machine_and_rows(tmp_path):
    rows = [{"case": "a", "step_s": 0.5, "runs": 3, "odd_s": float("nan")}, {"case": "b", "step_s": 0.25}]
    path = tmp_path / "new" / "bench.json"
    write_json(Report(bench="overlap", rows=rows, notes=["so it is"]), path)
    written = json.loads(path.read_text())
    assert written["bench"] == "overlap"
    assert written["rows"] == [{"case": "a", "step_s": 0.5, "runs": 3, "odd_s": None}, {"case": "b", "step_s": 0.25}]
    assert written["notes"] == ["so it is"]
    assert {"cpu", "cores", "memory_gib", "python", "packages"} <= set(written["machine"])
    assert as_json(Report(bench="x", rows=rows))["machine"].keys() == machine().keys()


def test_the_table_has_a_column_for_each_case(capsys):
    rows = [{"case": "a", "step_s": 0.5, "runs": 3}, {"case": "longer", "step_s": 0.25}]
    assert table(rows) == ["            a  longer", "step_s  0.500   0.250", "runs        3        "]
    print_table(Report(bench="x", rows=rows, notes=["first", "second"]))
    assert capsys.readouterr().out.endswith("\n\n- first\n- second\n")


def test_every_bench_has_its_number_of_runs_and_bad_usage_is_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert BENCHES.keys() == ROUNDS_AND_STEPS.keys()
    for words, shown in [
        (["nothing"], "invalid choice"),
        (["overlap", "async.max_stalenes=1"], "async.max_staleness"),
        (["overlap", "--rounds", "-1"], "at least 1"),
        (["start", "--folder", str(tmp_path)], "exists"),
    ]:
        assert main(words) == 2
        error = capsys.readouterr().err
        assert shown in error
        assert "Traceback" not in error
    assert not list(tmp_path.iterdir())
    assert parse(["trl", "seed=1", "--json", "x.json", "steps=2"]).overrides == ["seed=1", "steps=2"]


def test_a_command_that_fails_is_told_with_its_last_line(tmp_path):
    run_process([sys.executable, "-c", "print('fine')"], tmp_path / "logs" / "a.log", {})
    assert (tmp_path / "logs" / "a.log").read_text() == "fine\n"
    with pytest.raises(ForgeError, match=r"exit code 3: the cause .*b\.log"):
        run_process([sys.executable, "-c", "print('the cause'); exit(3)"], tmp_path / "b.log", {})
    run_process([sys.executable, "-c", "import os; print(os.environ['X'])"], tmp_path / "c.log", {"X": "given"})
    assert (tmp_path / "c.log").read_text() == "given\n"


def test_the_simulated_rows_have_every_figure_and_keep_their_aims(monkeypatch):
    monkeypatch.setattr(simulated, "NUM_REPLICAS", 4)
    monkeypatch.setattr(simulated, "GROUPS_PER_STEP", 32)
    rows = {row["case"]: row for row in simulated.rows_of(simulated.EVEN, simulated.at(2))}
    baseline, row = rows["simulated/S=0/keep_kv"], rows["simulated/S=2/keep_kv"]
    assert baseline["step_over_chain"] <= overlap.BASELINE_LIMIT
    assert overlap.BALANCED[0] <= baseline["generate_over_train"] <= overlap.BALANCED[1]
    assert baseline["speedup_measured"] == 1.0
    assert row["fraction_of_ideal"] >= 0.95
    assert row["learner_idle_fraction"] < 0.05
    assert row["unaccounted_fraction"] < 0.02
    assert row["staleness_max"] <= 2
    assert row["pause_s"] > 0 and row["discarded_tokens"] == row["recomputed_tokens"] == 0


def test_many_cases_are_printed_as_tables_below_each_other(capsys):
    rows = [{"case": f"case {number}", "step_s": float(number)} for number in range(14)]
    print_table(Report(bench="overlap", rows=rows))
    printed = capsys.readouterr().out.splitlines()
    assert len([line for line in printed if line.startswith("step_s")]) == 3
    assert all(f"case {number}" in " ".join(printed) for number in range(14))


def test_overlap_runs_only_the_rows_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(overlap, "measure_simulated", lambda: ([{"case": "simulated/S=2/keep_kv"}], ["a note"]))
    monkeypatch.setattr(overlap, "real", lambda plan: Report(bench="overlap", rows=[{"case": "real"}]))
    cases = {only: [row["case"] for row in overlap.measure(Case(only)).rows] for only in ("", *overlap.PARTS)}
    assert cases == {
        "": ["real", "simulated/S=2/keep_kv"],
        **dict.fromkeys(("real", *overlap.REAL_PARTS), ["real"]),
        "simulated": ["simulated/S=2/keep_kv"],
    }
    assert parse(["overlap", "--only", "simulated"]).only == "simulated"


@dataclass(frozen=True)
class Case:
    """As much of a plan as `overlap.measure` looks at."""

    only: str


@pytest.mark.parametrize(
    ("num_bytes", "tensors", "expected"),
    [
        (0.0, (), [(300, 100_000_000), (20_000, 81_920_000)]),
        (1e9, (), [(300, 1_000_000_000)]),
        (1e9, (300, 20_000), [(300, 1_000_000_000), (20_000, 1_000_000_000)]),
        (0.0, (5,), [(5, 100_000_000)]),
    ],
)
def test_the_models_that_weights_moves_are_those_asked_for(num_bytes, tensors, expected):
    assert [(each.num_tensors, each.num_bytes) for each in weights.workloads(num_bytes, tensors)] == expected


def test_a_model_without_room_for_its_tensors_is_refused():
    with pytest.raises(ConfigError, match="leaves less than 4 bytes to a tensor"):
        weights.workloads(1000.0, (20_000,))


@pytest.mark.parametrize("case", reshard.MESHES)
def test_a_replayed_transfer_is_three_times_as_fast_as_one_planned_anew(case):
    replayed, anew = reshard._rows(case, num_tensors=500, rounds=5)
    assert replayed["speedup"] == anew["pull_s"] / replayed["pull_s"] > reshard.AIM
    assert replayed["bytes"] == sum({0: 2048, 1: 2048, 2: 4096}[number % 3] for number in range(500))


def test_the_figures_of_a_swap_mode_leave_out_the_first_steps_and_end_with_the_reward_reached():
    def row(step):
        return {
            "step_s": 1.0, "weights/pause_s": 0.1, "weights/lag_s": 0.2,
            "policy/discarded_tokens": 4 if step > 3 else 99,
            "policy/recomputed_tokens": 6, "tokens/generated": 100, "staleness/mean": 1.5, "staleness/max": 2,
            "ratio/clip_fraction": 0.25, "reward/mean": step / 20,
        }  # fmt: skip

    found = swaps.figures([[row(step) for step in range(1, 21)]])
    assert found["discarded_tokens"] == 4
    assert (found["recomputed_tokens"], found["generated_tokens"]) == (6, 100)
    assert found["reward_last"] == pytest.approx(sum(range(11, 21)) / 200)
    assert found["staleness_max"] == 2 and found["step_s"] == 1.0


def test_the_entropy_bound_counts_which_elements_changed_and_by_how_much():
    old = np.zeros(1024, dtype=np.uint16)
    new = old.copy()
    assert deltas.entropy_bytes(old, new) == 0
    new[:512:2], new[1:512:2] = 1, 65535  # half of them, by one unit up or down
    assert deltas.entropy_bytes(old, new) == pytest.approx((1024 + 512) / 8)
    assert deltas.entropy_bytes(old, old + 1) == 0, "all by the same: nothing is left to tell"


def test_coding_a_small_change_is_near_the_bound_and_twenty_times_smaller():
    for row, rate in zip(deltas._coding_rows(1 << 22, rounds=1), deltas.RATES, strict=True):
        assert row["case"] == f"coding/{rate:.1%}"
        assert row["changed_fraction"] == pytest.approx(rate, rel=0.1)
        assert row["over_entropy_bound"] < 1.5
        assert row["times_smaller"] > (20 if rate <= 0.015 else 10)


def test_batches_are_running_text_of_one_size():
    source = deltas.batches(lambda text: np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32))
    batches = [next(source) for _ in range(20)]
    assert all(each.lengths.tolist() == [deltas.SAMPLE_TOKENS] * deltas.NUM_SAMPLES for each in batches)
    assert all(int(each.loss_mask.sum()) == each.num_tokens - deltas.NUM_SAMPLES for each in batches)
    text = "".join(bytes(each.token_ids.astype(np.uint8)).decode() for each in batches)
    assert text.count(" the ") > 20


def test_models_that_are_large_are_moved_in_few_ways_at_a_time():
    cases = list("abcdefg")
    assert weights.lots(cases, 10**8, 24 * 10**9) == [cases]
    assert weights.lots(cases, 10**9, 24 * 10**9) == [["a", "b", "c"], ["d", "e", "f"], ["g"]]
    assert weights.lots(cases, 10**12, 24 * 10**9) == [[case] for case in cases]
    assert 0 < weights.free_bytes() < 2**50
