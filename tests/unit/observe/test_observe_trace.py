import json

import pytest

from forge_async.observe.trace import WAIT, SpanBuffer, Tracer


def read(path):
    return json.loads(path.read_text())["traceEvents"]


class Ticks:
    """A clock that the test moves."""

    def __init__(self):
        self.time_s = 0.0

    def __call__(self):
        return self.time_s


def test_lanes_carry_the_actors_names_and_one_clock(tmp_path):
    tracer = Tracer(tmp_path / "trace.json")
    tracer.add("policy_0", [("generate", "work", 1000.0, 0.25, {"groups": 4})])
    tracer.add("learner_0", [("batch", WAIT, 1000.1, 0.15, None)])
    tracer.close()
    events = read(tmp_path / "trace.json")
    lanes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans = {lanes[e["pid"]]: e for e in events if e["ph"] == "X"}
    assert set(spans) == {"policy_0", "learner_0"}
    generate = spans["policy_0"]
    assert (generate["ts"], generate["dur"], generate["cat"]) == (1_000_000_000, 250_000, "work")
    assert generate["args"] == {"groups": 4}
    assert (spans["learner_0"]["cat"], spans["learner_0"]["args"]) == ("wait", {})
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"policy_0", "learner_0"}


def test_overlapping_spans_of_one_actor_go_to_rows_that_nest(tmp_path):
    spans = [
        ("outer", "work", 1.0, 4.0, None),
        ("inner", "work", 2.0, 1.0, None),
        ("crossing", "work", 4.5, 2.0, None),
        ("after", "work", 5.0, 1.0, None),
    ]
    tracer = Tracer(tmp_path / "trace.json")
    tracer.add("worker", spans)
    tracer.close()
    rows = {e["name"]: e["tid"] for e in read(tmp_path / "trace.json") if e["ph"] == "X"}
    assert rows == {"outer": 0, "inner": 0, "crossing": 1, "after": 0}
    names = [e["args"]["name"] for e in read(tmp_path / "trace.json") if e["name"] == "thread_name"]
    assert names == ["worker", "worker (2)"]


def test_a_span_is_recorded_also_when_its_body_fails():
    clock = Ticks()
    buffer = SpanBuffer(wall_s=lambda: 500.0, elapsed_s=clock)
    with pytest.raises(ValueError, match="bad"), buffer.span("score", name="own") as args:
        clock.time_s = 2.0
        args["num_groups"] = 3
        raise ValueError("bad")
    assert buffer.drain() == [("score", "work", 500.0, 2.0, {"name": "own", "num_groups": 3, "error": "ValueError"})]
    assert buffer.drain() == []


def test_a_buffer_that_nobody_drains_stays_bounded():
    buffer = SpanBuffer(max_spans=2)
    for _ in range(5):
        buffer.record("x", "work", 0.0, 1.0)
    assert len(buffer.drain()) == 2
    assert buffer.num_dropped == 3


def test_the_file_is_valid_after_each_flush_and_counters_have_their_lane(tmp_path):
    path = tmp_path / "trace.json"
    tracer = Tracer(path)
    assert read(path) == []
    for step in range(3):
        with tracer.span("step", step=step):
            pass
        tracer.counter("queue", 7.0, depth=step)
        tracer.flush()
        assert len([e for e in read(path) if e["ph"] == "X"]) == step + 1
    assert [e["args"] for e in read(path) if e["ph"] == "C"] == [{"depth": 0}, {"depth": 1}, {"depth": 2}]


def test_a_trace_stops_growing_at_its_limit(tmp_path, caplog):
    tracer = Tracer(tmp_path / "trace.json", max_events=3)
    tracer.add("a", [("x", "work", float(at), 0.5, None) for at in range(10)])
    tracer.close()
    tracer.close()
    assert len([e for e in read(tmp_path / "trace.json") if e["ph"] == "X"]) == 3
    assert "largest size" in caplog.text


def test_without_a_path_nothing_is_written_or_kept(tmp_path):
    tracer = Tracer(None)
    with tracer.span("step"):
        tracer.counter("queue", depth=1)
    tracer.add("a", [("x", "work", 0.0, 1.0, None)])
    tracer.close()
    assert list(tmp_path.iterdir()) == []
