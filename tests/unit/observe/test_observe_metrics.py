import builtins
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge_async.core.errors import ForgeError, MissingPackageError
from forge_async.observe import names
from forge_async.observe.process_stats import memory_metrics, process_stats
from forge_async.observe.sinks import CompositeSink, TensorBoardSink
from forge_async.observe.timing import BusyMeter


class ListSink:
    def __init__(self, fails=False):
        self.rows, self.fails, self.closed = [], fails, 0

    def write(self, step, row):
        if self.fails:
            raise OSError("disk full")
        self.rows.append((step, row))

    def close(self):
        self.closed += 1
        if self.fails:
            raise OSError("disk full")


def test_the_promised_names_are_required_and_a_row_is_checked():
    row = dict.fromkeys(names.REQUIRED, 0.0)
    names.check_row(row)
    assert len(names.REQUIRED) == 31
    del row["staleness/p90"], row["loss"]
    assert names.missing_names(row) == ["loss", "staleness/p90"]
    with pytest.raises(ForgeError, match="loss, staleness/p90"):
        names.check_row(row)


def test_every_name_has_a_meaning_and_stands_in_the_reference():
    table = names.markdown_table()
    assert all(metric.meaning and f"`{name}`" in table for name, metric in names.METRICS.items())
    assert names.per_process(names.RSS_BYTES, "policy_0") == "memory/rss_bytes/policy_0"


def test_the_documentation_has_the_table_of_names():
    page = Path(__file__).parents[3] / "docs" / "observability.md"
    assert names.markdown_table() in page.read_text(encoding="utf-8")


def test_a_failing_second_sink_is_disabled_with_one_warning(caplog):
    first, bad, good = ListSink(), ListSink(fails=True), ListSink()
    told: list[str] = []
    sink = CompositeSink(first, [bad, good], told.append)
    for step in (1, 2):
        sink.write(step, {"loss": 0.0})
    sink.close()
    assert len(first.rows) == len(good.rows) == 2
    assert (
        told
        == [record.message for record in caplog.records]
        == ["ListSink failed at step 1 and is disabled: disk full"]
    )
    assert (first.closed, good.closed, bad.closed) == (1, 1, 0)


def test_a_failing_first_sink_is_an_error():
    with pytest.raises(OSError, match="disk full"):
        CompositeSink(ListSink(fails=True)).write(1, {})


def test_a_sink_that_fails_while_closing_stops_nothing(caplog):
    first, bad = ListSink(), ListSink(fails=True)
    CompositeSink(first, [bad]).close()
    assert first.closed == bad.closed == len(caplog.records) == 1


def test_a_missing_tensorboard_is_named_with_its_remedy(tmp_path, monkeypatch):
    real = builtins.__import__

    def without_tensorboard(name, *args, **kwargs):
        if name.startswith("tensorboard"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    with pytest.raises(MissingPackageError, match="pip install tensorboard"):
        TensorBoardSink(tmp_path)


def test_tensorboard_gets_the_finite_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.write(1, {"step": 1, "loss": 0.5, "grad_norm": float("nan")})
    sink.write(2, {"step": 2, "loss": 0.25})
    sink.close()
    sink.close()
    sink.write(3, {"loss": 0.0})
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    assert events.Tags()["tensors"] == ["loss"]
    assert [event.step for event in events.Tensors("loss")] == [1, 2]


def test_observe_loads_neither_torch_nor_tensorboard():
    modules = "names sinks run_directory group_events rollout_log trace timing process_stats summary progress report"
    imports = "; ".join(f"import forge_async.observe.{module}" for module in modules.split())
    heavy = "{'torch', 'tensorboard', 'monarch', 'omegaconf'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"import sys; {imports}; assert not {heavy}, {heavy}"], check=False)
    assert done.returncode == 0


class Ticks:
    def __init__(self):
        self.time_s = 100.0

    def __call__(self):
        return self.time_s


def test_busy_time_is_a_union_and_open_spans_count_up_to_the_reading():
    clock = Ticks()
    meter = BusyMeter(clock)
    first, second = meter.busy(), meter.busy()
    first.__enter__()
    clock.time_s += 1
    second.__enter__()
    clock.time_s += 1
    first.__exit__(None, None, None)
    clock.time_s += 1
    reading = meter.read()
    assert (reading.elapsed_s, reading.busy_s, reading.wait_s, reading.busy_fraction) == (3, 3, 0, 1.0)
    clock.time_s += 1
    second.__exit__(None, None, None)
    with pytest.raises(ValueError, match="x"), meter.waiting():
        clock.time_s += 2
        raise ValueError("x")
    clock.time_s += 1
    reading = meter.read()
    assert (reading.elapsed_s, reading.busy_s, reading.wait_s, reading.busy_fraction) == (4, 1, 2, 0.25)
    assert meter.read().busy_fraction == 0.0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_process_stats_read_proc_and_miss_the_dead():
    stats = process_stats(os.getpid())
    assert stats is not None
    assert stats.rss_bytes > 1_000_000
    assert stats.cpu_s > 0
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_stats(child.pid) is None, "a zombie holds no memory"
    child.wait()
    metrics = memory_metrics({"controller": os.getpid(), "policy_0": child.pid})
    assert set(metrics) == {"memory/rss_bytes", "memory/rss_bytes/controller"}
