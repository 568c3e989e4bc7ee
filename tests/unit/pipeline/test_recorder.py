import asyncio
import dataclasses
import io
import json
import os
import time

import pytest

from forge_async.core.records import PromptId
from forge_async.core.versions import PolicyVersion
from forge_async.observe import names
from forge_async.observe.group_events import EventsLog, read_events, read_incidents
from forge_async.observe.progress import Progress
from forge_async.observe.rollout_log import RolloutLog, read_rollouts
from forge_async.observe.sinks import JsonlSink, read_metrics
from forge_async.observe.trace import Tracer
from forge_async.pipeline.estimates import Estimate
from forge_async.pipeline.evaluations import Evaluated
from forge_async.pipeline.parity_alarm import ParityAlarm
from forge_async.pipeline.ports import PassAtK
from forge_async.pipeline.publish import Publication
from forge_async.pipeline.recorder import Recorder
from forge_async.pipeline.store_keeper import StoreRestart
from tests.fakes import (
    FakeAdmission,
    FakeReplay,
    FakeReplica,
    FakeWorkers,
    eval_scores,
    group_record,
    learner_step,
    make_pull,
)

HALF_AT_4 = PassAtK(k=4, estimate=Estimate(mean=0.5, low=0.2, high=0.8))


class Records:
    """A recorder and what it wrote."""

    def __init__(self, folder, num_replicas=1, mode="off", num_done=0):
        self.folder = folder
        self.terminal = io.StringIO()
        self.replicas = [FakeReplica(f"policy_{i}") for i in range(num_replicas)]
        self.recorder = Recorder(
            begun_s=0.5,
            sink=JsonlSink(folder / "metrics.jsonl"),
            events=EventsLog(folder / "events.jsonl"),
            rollouts=RolloutLog(folder / "rollouts.jsonl.zst"),
            rollouts_per_step=2,
            tracer=Tracer(folder / "trace.json"),
            progress=Progress(total_steps=3, mode=mode, stream=self.terminal),
            replicas=self.replicas,
            workers=FakeWorkers(FakeReplay(1, 0), self.replicas),
            num_done=num_done,
        )

    def step(self, step, *indices, made=True):
        """One step of the ring over the groups `indices`."""
        admissions = [FakeAdmission(index=i, prompt_id=PromptId(source="fake", epoch=0, index=i)) for i in indices]
        self.recorder.admitted(admissions, "policy_0")
        if made:
            self.recorder.made([group_record(index) for index in indices])
        self.recorder.stepped(step, [learner_step(PolicyVersion(step=step + 1), indices)])

    @property
    def rows(self):
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def events(self):
        return {event["index"]: event for event in read_events(self.folder / "events.jsonl")}


@pytest.fixture
def records(tmp_path):
    made = Records(tmp_path)
    yield made
    made.recorder.close("the test ended")


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_every_row_has_all_promised_names(records):
    running = asyncio.create_task(records.recorder.run())
    for step in range(3):
        records.step(step, 2 * step, 2 * step + 1)
        await until(lambda step=step: len(records.rows) == step + 1)
    running.cancel()
    await records.recorder.finish("the run ended")
    assert [row["step"] for row in records.rows] == [1, 2, 3]
    for row in records.rows:
        names.check_row(row)
    row = records.rows[0]
    assert row["loss"] == 0.5
    assert row["groups/trained"] == 2
    assert row["tokens/generated"] == 5
    assert row["memory/rss_bytes"] == 200 + 100 + 50
    assert row["memory/rss_bytes/policy_0"] == 100


async def test_a_row_that_is_being_written_when_the_run_ends_is_not_lost(records):
    running = asyncio.create_task(records.recorder.run())
    records.step(0, 0)
    records.step(1, 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert records.rows == []
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await records.recorder.finish("the run ended")
    assert [row["step"] for row in records.rows] == [1, 2]


async def test_steps_keep_their_order_when_many_wait(records):
    for step in range(5):
        records.step(step, step)
    await records.recorder.finish("the run ended")
    assert [row["step"] for row in records.rows] == [1, 2, 3, 4, 5]


async def test_every_group_ends_once_in_the_events(records):
    admissions = [FakeAdmission(index=i, prompt_id=PromptId(source="fake", epoch=0, index=i)) for i in (7, 8)]
    records.recorder.admitted(admissions, "policy_0")
    records.recorder.made([group_record(7, outcome="filtered")])
    records.step(0, 1, 2)
    await records.recorder.finish("the last step is done")
    ends = {index: (event["outcome"], event["reason"]) for index, event in records.events.items()}
    assert ends == {
        1: ("trained", ""),
        2: ("trained", ""),
        7: ("filtered", "zero_variance"),
        8: ("cancelled", "the last step is done"),
    }
    lines = (records.folder / "events.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert records.events[1]["generated_s"] == 0.5, "counted from the start of the run"


async def test_a_few_rollouts_a_step_are_kept_for_people(records):
    records.step(0, 1, 2, 3)
    await records.recorder.finish("the run ended")
    kept = list(read_rollouts(records.folder / "rollouts.jsonl.zst"))
    assert [(rollout["step"], rollout["group"], rollout["completion"]) for rollout in kept] == [
        (1, 1, "c"),
        (1, 2, "c"),
    ]


async def test_the_weights_way_stands_in_the_row_that_follows(tmp_path):
    records = Records(tmp_path, num_replicas=2)
    version = PolicyVersion(step=1)
    records.recorder.published(Publication(version=version, started_s=1.0, duration_s=0.3, num_bytes=64))
    records.recorder.pulled("policy_0", make_pull(version, fetch_s=0.5, pause_s=0.2))
    records.recorder.pulled("policy_1", make_pull(version, fetch_s=0.1, pause_s=0.1))
    records.step(0, 0)
    await records.recorder._write_waiting()
    records.recorder.pulled("policy_0", make_pull(version.next(), fetch_s=0.1, pause_s=0.1))
    records.step(1, 1)
    await records.recorder.finish("the run ended")
    first, second = records.rows
    assert (first["weights/publish_s"], first["weights/bytes"]) == (0.3, 64)
    assert (first["weights/pull_s"], first["weights/pause_s"]) == (pytest.approx(0.7), 0.2), "of the slowest replica"
    assert (second["weights/pull_s"], second["weights/pause_s"]) == (pytest.approx(0.2), 0.1)


async def test_the_gap_of_the_replica_that_is_furthest_from_the_learner_stands_in_the_row(tmp_path):
    records, version = Records(tmp_path, num_replicas=2), PolicyVersion(step=1)
    for step, gaps in enumerate([(0.3, 0.1), (0.05, 0.2), (None, None)]):
        for number, gap in enumerate(gaps):
            records.recorder.pulled(f"policy_{number}", dataclasses.replace(make_pull(version), probe_gap=gap))
        records.step(step, step)
        await records.recorder._write_waiting()
        version = version.next()
    await records.recorder.finish("the run ended")
    assert [row.get("weights/probe_gap") for row in records.rows] == [0.3, 0.2, None]


async def test_the_share_of_changes_and_deltas_that_were_given_up_stand_in_the_row(tmp_path):
    records = Records(tmp_path, num_replicas=1, mode="lines")
    version = PolicyVersion(step=1)
    publication = Publication(version=version, started_s=1.0, duration_s=0.3, num_bytes=2, changed_fraction=0.25)
    records.recorder.published(publication)
    damaged = dataclasses.replace(make_pull(version), damage="bucket 3 of a delta is damaged")
    records.recorder.pulled("policy_0", damaged)
    records.step(0, 0)
    await records.recorder._write_waiting()
    records.recorder.published(dataclasses.replace(publication, changed_fraction=None))
    records.step(1, 1)
    await records.recorder.finish("the run ended")
    assert [row.get("weights/changed_fraction") for row in records.rows] == [0.25, None]
    assert [row["weights/damaged_deltas"] for row in records.rows] == [1, 0]
    text = "policy_0 pulled policy@0.1 whole: bucket 3 of a delta is damaged"
    assert text in records.terminal.getvalue()
    [incident] = read_incidents(records.folder / "events.jsonl")
    assert (incident["event"], incident["step"], incident["text"]) == ("delta_replaced", 0, text)


async def test_broadcasts_that_broke_off_and_records_that_were_switched_off_are_incidents(records):
    records.step(0, 0)
    records.recorder.sink_disabled("MySink failed at step 1 and is disabled: disk full")
    step = learner_step(PolicyVersion(step=2), [1])
    broken = dataclasses.replace(step, broken_broadcasts=("The broadcast of v1/0 broke off: policy_0 stalled.",))
    records.recorder.stepped(1, [step, broken])
    await records.recorder.finish("the run ended")
    assert [
        (each["event"], each["step"], each["text"]) for each in read_incidents(records.folder / "events.jsonl")
    ] == [
        ("sink_disabled", 1, "MySink failed at step 1 and is disabled: disk full"),
        ("broadcast_broken", 2, "learner_1: The broadcast of v1/0 broke off: policy_0 stalled."),
    ]


async def test_an_incident_stands_after_the_steps_that_were_done_when_it_happened_those_before_a_resume_too(tmp_path):
    records = Records(tmp_path, num_done=7)
    records.step(7, 0)
    records.recorder.store_restarted(dataclasses.replace(restart(), died_s=time.time()), pid=None)
    records.step(8, 1)
    records.recorder.store_restarted(restart(), pid=None)
    await records.recorder.finish("the run ended")
    assert [each["step"] for each in read_incidents(tmp_path / "events.jsonl")] == [8, 7]


@pytest.mark.parametrize(("mode", "lines"), [("lines", 2), ("off", 0)])
async def test_the_transport_and_its_rate_are_printed_once_for_each_replica(tmp_path, mode, lines):
    records = Records(tmp_path, num_replicas=2, mode=mode)
    pull = dataclasses.replace(make_pull(PolicyVersion(step=1), fetch_s=0.3, pause_s=0.1), num_bytes=2_000_000)
    for replica in ("policy_0", "policy_1", "policy_0"):
        records.recorder.pulled(replica, dataclasses.replace(pull, transport="shm"))
    printed = records.terminal.getvalue().splitlines()
    assert printed == [f"weights to policy_{i}: shm, 2 MB in 400 ms (5 MB/s)" for i in range(lines)]


async def test_another_transport_than_for_the_version_before_is_printed(tmp_path):
    records = Records(tmp_path, mode="lines")
    pull = dataclasses.replace(make_pull(PolicyVersion(step=1), fetch_s=0.3, pause_s=0.1), num_bytes=2_000_000)
    for transport in ("shm", "broadcast", "broadcast", "shm"):
        records.recorder.pulled("policy_0", dataclasses.replace(pull, transport=transport))
    assert [line.split()[3] for line in records.terminal.getvalue().splitlines()] == ["shm,", "broadcast,", "shm,"]


async def test_the_lag_counts_from_the_end_of_the_step_to_the_first_token_of_its_version(records):
    records.step(0, 0)
    ended_s = records.recorder._steps[0].ended_s
    stats = await records.replicas[0].stats()
    stats.service.swaps.append((1, ended_s + 0.25))

    async def with_swap():
        return stats

    records.replicas[0].stats = with_swap
    await records.recorder.finish("the run ended")
    assert records.rows[0]["weights/lag_s"] == pytest.approx(0.25)


async def test_an_evaluation_stands_in_the_row_after_its_end_with_the_versions_that_answered(records):
    records.step(0, 0)
    await records.recorder._write_waiting()
    records.recorder.evaluated(Evaluated(step=1, scores=eval_scores(0.75, (1, 2), pass_at=(HALF_AT_4,))))
    records.step(1, 1)
    records.step(2, 2)
    await records.recorder.finish("the run ended")
    assert [row.get("eval/score") for row in records.rows] == [None, 0.75, None]
    assert (records.rows[1]["eval/oldest_version"], records.rows[1]["eval/newest_version"]) == (1, 2)
    assert (records.rows[1]["eval/low"], records.rows[1]["eval/high"]) == (0.375, 0.875)
    assert records.rows[1]["eval/pass_at_4"] == 0.5


async def test_the_alarm_looks_at_every_row(records):
    told = []
    records.recorder._alarm = ParityAlarm(1e-3, told.append)
    for step in range(3):
        records.step(step, step)
        figures = records.recorder._steps[-1].ranks[0].result.figures
        figures["mismatch/fresh_logprob_diff_max"] = [1e-6, 0.5, 0.7][step]
    await records.recorder.finish("the run ended")
    assert len(told) == 1 and told[0].startswith("step 2: mismatch/fresh_logprob_diff_max=0.5")


async def test_groups_that_replay_ended_by_itself_are_told_as_it_ended_them(records):
    admissions = [FakeAdmission(index=i, prompt_id=PromptId(source="fake", epoch=0, index=i)) for i in (7, 8)]
    records.recorder.admitted(admissions, "policy_0")
    records.step(0, 0)
    records.recorder._steps[0].ranks[0].batch["ended"] = [(7, "expired", "too_old"), (8, "failed", "tries_used_up")]
    await records.recorder.finish("the run ended")
    told = {index: (event["outcome"], event["reason"]) for index, event in records.events.items()}
    assert told == {0: ("trained", ""), 7: ("expired", "too_old"), 8: ("failed", "tries_used_up")}


async def test_closing_needs_no_living_actor_and_may_be_repeated(records):
    records.recorder.admitted([FakeAdmission(index=0, prompt_id=PromptId(source="f", epoch=0, index=0))], "policy_0")
    records.recorder.close("the policy died")
    records.recorder.close("again")
    assert records.events[0]["reason"] == "the policy died"
    json.loads((records.folder / "trace.json").read_text())


async def test_processes_that_report_nothing_are_read_from_the_system(tmp_path):
    records = Records(tmp_path)
    records.recorder._pids = {"controller": os.getpid(), "store": 2**22 + 1}
    records.step(0, 0)
    await records.recorder.finish("the run ended")
    row = records.rows[0]
    assert row["memory/rss_bytes/controller"] > 1e6
    assert row["cpu_s/controller"] > 0
    assert "memory/rss_bytes/store" not in row, "a process that has ended has no memory"
    assert row["memory/rss_bytes"] == pytest.approx(100 + 50 + 200 + row["memory/rss_bytes/controller"])


def restart(number=1):
    return StoreRestart(
        number=number, limit=2, cause="store was killed.", died_s=10.5, duration_s=2.0, version=PolicyVersion(step=4)
    )


async def test_a_store_that_was_replaced_is_told_once_everywhere(records):
    records.step(0, 1)
    records.recorder.store_restarted(restart(), pid=os.getpid())
    await records.recorder.finish("the run ended")
    assert read_incidents(records.folder / "events.jsonl", "store_restarted") == [
        {
            "event": "store_restarted", "step": 0, "time_s": 10.0, "number": 1, "cause": "store was killed.",
            "duration_s": 2.0, "version": 4, "repeated": 0,
            "text": "store was killed. Another took its place and has policy@0.4, 2.0 s later (1 of 2).",
        }
    ]  # fmt: skip
    assert list(records.events) == [1], "readers of groups pass it over"
    told = [line for line in records.terminal.getvalue().splitlines() if line.startswith("warning: ")]
    assert told == ["warning: store was killed. Another took its place and has policy@0.4, 2.0 s later (1 of 2)."]
    assert records.rows[0]["memory/rss_bytes/store"] > 0, "its process is the one that counts from then on"
    assert "replace the store" in (records.folder / "trace.json").read_text()


async def test_a_store_that_dies_when_the_records_are_closed_is_told_to_people_only(records):
    await records.recorder.finish("the run ended")
    records.recorder.store_restarted(restart(), pid=None)
    assert "Another took its place" in records.terminal.getvalue()
    assert read_incidents(records.folder / "events.jsonl", "store_restarted") == []
