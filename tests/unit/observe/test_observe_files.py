"""What a run writes survives its writer, and is always valid."""

import json
import subprocess
import sys
from types import MappingProxyType

import numpy as np
import pytest

from forge_async.core.errors import ForgeError
from forge_async.observe.group_events import EventsLog, GroupEvent, read_events
from forge_async.observe.jsonl import JsonlWriter, encode, plain, read_jsonl
from forge_async.observe.rollout_log import RolloutLog, RolloutRecord, read_rollouts
from forge_async.observe.sinks import JsonlSink, read_metrics
from forge_async.observe.trace import Tracer

WRITER = """
import os, signal, sys
from pathlib import Path
from forge_async.observe.group_events import EventsLog, GroupEvent
from forge_async.observe.rollout_log import RolloutLog, RolloutRecord
from forge_async.observe.sinks import JsonlSink
from forge_async.observe.trace import Tracer
run = Path(sys.argv[1])
metrics, events = JsonlSink(run / "metrics.jsonl"), EventsLog(run / "events.jsonl")
rollouts, tracer = RolloutLog(run / "rollouts.jsonl.zst"), Tracer(run / "trace.json")
for step in (1, 2, 3):
    with tracer.span("step", step=step):
        metrics.write(step, {"loss": 0.5})
        events.write([GroupEvent(index=step, prompt_id="p:0:0", admitted_s=0.0, ended_s=1.0, outcome="trained")])
        rollouts.write([RolloutRecord(step=step, group=step, prompt="p", completion="c", reward=1.0)])
    tracer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def rollout(step, text="7"):
    return RolloutRecord(step=step, group=step, prompt="3 + 4", completion=text, reward=1.0, versions=(step, step))


def test_a_killed_writer_leaves_every_file_readable(tmp_path):
    assert subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=False).returncode == -9
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [event["index"] for event in read_events(tmp_path / "events.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in read_rollouts(tmp_path / "rollouts.jsonl.zst")] == [1, 2, 3]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert [event["args"]["step"] for event in trace["traceEvents"] if event["ph"] == "X"] == [1, 2, 3]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "reward/mean": np.float32(0.5)})
    sink.write(2, {"loss": np.float32("nan"), "memory/rss_bytes": np.int64(7)})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 1, "loss": None, "grad_norm": None, "reward/mean": 0.5}
    assert json.loads(lines[1]) == {"step": 2, "loss": None, "memory/rss_bytes": 7}
    sink.close()
    sink.close()


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [1.5, None, "x", True], "c": (1, 2)},
        {"a": np.float32(0.5), "b": np.int64(7), "c": np.arange(3), "d": MappingProxyType({"e": 1})},
        {"a": [1.0, {"b": float("nan")}], "c": np.array([np.inf, 1.0])},
        {1: "a", np.int64(2): "b", None: "c"},
    ],
)
def test_encode_writes_whatever_it_is_given_as_plain_does(value):
    assert encode(value).decode() == json.dumps(plain(value))


def test_encode_takes_arrays_and_broken_unicode():
    assert json.loads(encode({"a": np.array([1.0, np.nan]), "b": (1, 2)})) == {"a": [1.0, None], "b": [1, 2]}
    assert json.loads(encode({"text": "ok \ud800 日本\u2028x"})) == {"text": "ok ? 日本\u2028x"}


def test_a_torn_line_is_passed_over_and_cut_before_appending(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    assert list(read_jsonl(path)) == [{"step": 1}]
    writer = JsonlWriter(path)
    writer.write({"step": 2})
    writer.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize(("before", "after"), [(b"", b""), (b"torn", b""), (b"x" * 200_000, b""), (b"{}\n", b"{}\n")])
def test_opening_keeps_whole_lines_only(tmp_path, before, after):
    path = tmp_path / "file.jsonl"
    path.write_bytes(before)
    JsonlWriter(path).close()
    assert path.read_bytes() == after


def test_a_bad_line_in_the_middle_is_passed_over_with_a_warning(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff\n[1]\n{"a": 2}\n')
    assert list(read_jsonl(path)) == [{"a": 1}, {"a": 2}]
    assert "line 2" in caplog.text
    assert "line 3" in caplog.text


def test_absent_files_read_as_empty(tmp_path):
    assert read_metrics(tmp_path / "no") == read_events(tmp_path / "no") == list(read_rollouts(tmp_path / "no")) == []


def test_the_last_row_of_a_step_taken_twice_counts(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, loss in [(1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5)]:
        sink.write(step, {"step": step, "loss": loss})
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.5, 3.0]


def test_rollouts_survive_a_torn_frame_and_go_on_after_it(tmp_path):
    path = tmp_path / "rollouts.jsonl.zst"
    log = RolloutLog(path)
    log.write([rollout(1), rollout(1, "long " * 50_000)])
    log.write([])
    log.write([rollout(2)])
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    assert [row["step"] for row in read_rollouts(path)] == [1, 1, 2]
    log = RolloutLog(path)
    log.write([rollout(3, "drei\nzeilen\r\u2028")])
    log.close()
    rows = list(read_rollouts(path))
    assert [row["step"] for row in rows] == [1, 1, 2, 3]
    assert rows[3]["completion"] == "drei\nzeilen\r\u2028"
    assert rows[3]["versions"] == [3, 3]


def test_every_cut_of_a_rollout_file_reads_as_a_prefix(tmp_path):
    path = tmp_path / "rollouts.jsonl.zst"
    log = RolloutLog(path)
    for step in range(5):
        log.write([rollout(step)])
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        steps = [row["step"] for row in read_rollouts(path)]
        assert steps == list(range(len(steps)))
        assert len(steps) >= end * 5 // len(whole) - 1


def test_an_event_tells_the_way_of_its_group(tmp_path):
    log = EventsLog(tmp_path / "events.jsonl")
    common = {"index": 4, "prompt_id": "sums:0:4", "admitted_s": 1.0}
    log.write([GroupEvent(**common, ended_s=2.0, outcome="cancelled", reason="the learner was restored")])
    log.write(
        [
            GroupEvent(
                **common,
                generated_s=2.0,
                scored_s=2.5,
                taken_s=3.0,
                ended_s=4.0,
                outcome="trained",
                versions=(2, 3),
                replica="policy_0",
                num_tokens=99,
                reward_mean=0.5,
            )
        ]
    )
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event["outcome"] == "trained"
    assert event["versions"] == [2, 3]
    assert set(event) >= {"index", "prompt_id", "admitted_s", "generated_s", "scored_s", "taken_s", "ended_s", "reason"}


def test_an_unknown_outcome_is_refused():
    with pytest.raises(ForgeError, match="'lost'"):
        GroupEvent(index=1, prompt_id="p", admitted_s=0.0, ended_s=0.0, outcome="lost")


def test_a_resumed_trace_goes_on_after_a_torn_tail(tmp_path):
    path = tmp_path / "trace.json"
    with_tracer(path, "policy_0", 1.0)
    path.write_bytes(path.read_bytes()[:-4] + b',\n{"ph": "X", "na')
    with_tracer(path, "learner_0", 2.0)
    with_tracer(path, "policy_0", 3.0)
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert [e["pid"] for e in events if e["ph"] == "X"] == [lanes[n] for n in ("policy_0", "learner_0", "policy_0")]


def with_tracer(path, lane, start_s):
    tracer = Tracer(path)
    tracer.add(lane, [("generate", "work", start_s, 0.5, None)])
    tracer.close()


def test_a_file_that_is_no_trace_is_set_aside(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("notes")
    Tracer(path).close()
    assert json.loads(path.read_text())["traceEvents"] == []
    assert path.with_name("trace.json.unreadable").read_text() == "notes"
