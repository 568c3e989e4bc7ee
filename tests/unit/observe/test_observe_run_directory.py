from pathlib import Path

import pytest

from forge_async.core.errors import ConfigError
from forge_async.observe.run_directory import RunDirectory, default_path, write_atomically


def make(path, **flags):
    """Create and let go of a run directory."""
    with RunDirectory.create(path, config="seed: 0\n", **flags) as run:
        return run


def test_the_layout_and_latest(tmp_path):
    run = make(tmp_path / "runs" / "a")
    assert run.config.read_text() == "seed: 0\n"
    assert run.journal.is_dir()
    assert run.checkpoints.is_dir()
    assert run.logs.is_dir()
    assert (run.metrics.name, run.events.name, run.rollouts.name) == (
        "metrics.jsonl",
        "events.jsonl",
        "rollouts.jsonl.zst",
    )
    make(tmp_path / "runs" / "b")
    assert (tmp_path / "runs" / "latest").readlink() == Path("b")


def test_an_existing_path_is_refused_without_a_flag(tmp_path):
    make(tmp_path / "a")
    for path in (tmp_path / "a", tmp_path):
        with pytest.raises(ConfigError, match="exists; give another"):
            RunDirectory.create(path)


def test_resume_keeps_the_files(tmp_path):
    run = make(tmp_path / "a")
    run.metrics.write_text("{}\n")
    assert make(tmp_path / "latest", resume=True).path == run.path
    assert run.metrics.exists()


def test_overwrite_deletes_a_run(tmp_path):
    run = make(tmp_path / "a")
    run.metrics.write_text("{}\n")
    assert not make(tmp_path / "a", overwrite=True).metrics.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]


def test_overwrite_takes_an_empty_directory(tmp_path):
    (tmp_path / "a").mkdir()
    assert make(tmp_path / "a", overwrite=True).config.exists()


@pytest.mark.parametrize("entry", ["thesis.tex", "config.yaml", "journal/x", ".git/config"])
def test_overwrite_never_deletes_what_is_no_run(tmp_path, entry):
    path = tmp_path / "home" / entry
    path.parent.mkdir(parents=True)
    path.write_text("dear")
    with pytest.raises(ConfigError, match="does not look like"):
        RunDirectory.create(tmp_path / "home", overwrite=True)
    assert path.read_text() == "dear"


def test_overwrite_spares_a_repository_laid_out_like_a_run(tmp_path):
    run = make(tmp_path / "a")
    (run.path / ".git").mkdir()
    with pytest.raises(ConfigError, match="does not look like"):
        RunDirectory.create(run.path, overwrite=True)


def test_overwrite_never_deletes_a_file_or_what_a_link_outside_holds(tmp_path):
    (tmp_path / "file").write_text("dear")
    with pytest.raises(ConfigError, match="does not look like"):
        RunDirectory.create(tmp_path / "file", overwrite=True)
    run = make(tmp_path / "a")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "data").write_text("dear")
    (run.path / "data").symlink_to(tmp_path / "outside")
    make(tmp_path / "a", overwrite=True)
    assert (tmp_path / "outside" / "data").read_text() == "dear"


@pytest.mark.parametrize("flag", ["resume", "overwrite"])
def test_a_run_that_is_still_going_is_left_alone(tmp_path, flag):
    run = RunDirectory.create(tmp_path / "a", config="seed: 0\n")
    with pytest.raises(ConfigError, match="has not ended"):
        RunDirectory.create(tmp_path / "a", **{flag: True})
    run.close()
    make(tmp_path / "a", **{flag: True})


@pytest.mark.parametrize(
    ("path", "flags", "message"),
    [
        ("", {"resume": True}, "needs run.dir"),
        ("a", {"resume": True, "overwrite": True}, "exclude each other"),
        ("missing", {"resume": True}, "does not exist"),
        ("empty", {"resume": True}, "not the directory of a run"),
        ("file/below", {}, "cannot be used"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(tmp_path, monkeypatch, path, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message) as caught:
        RunDirectory.create(path, **flags)
    assert "\n" not in str(caught.value)


def test_the_default_names_never_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("forge_async.observe.run_directory.time.strftime", lambda form: "20260101-120000")
    assert make("").path.name == "grpo-20260101-120000"
    assert make("").path == tmp_path / "runs" / "grpo-20260101-120000-2"
    assert default_path("sft").name == "sft-20260101-120000"


def test_a_real_file_named_latest_is_left_alone(tmp_path):
    (tmp_path / "latest").write_text("mine")
    make(tmp_path / "a")
    assert (tmp_path / "latest").read_text() == "mine"


def test_atomic_writing_leaves_nothing_beside(tmp_path):
    write_atomically(tmp_path / "x.json", "1")
    write_atomically(tmp_path / "x.json", "2")
    assert (tmp_path / "x.json").read_text() == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
