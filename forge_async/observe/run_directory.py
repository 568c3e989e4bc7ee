"""The directory of a run: its layout, and what may be done to a directory that is already there."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

from forge_async.core.errors import ConfigError

SUBDIRECTORIES = ("journal", "checkpoints", "logs")


class RunDirectory:
    """Paths of a run's files. Made by `create` to be written, or by the constructor to be read.

    A directory that was made by `create` is locked against a second writer until `close` or the process's end.
    """

    def __init__(self, path: Path) -> None:
        self._lock: int | None = None
        self.path = path
        """The directory itself, absolute."""
        self.config = path / "config.yaml"
        """The resolved configuration."""
        self.metrics = path / "metrics.jsonl"
        """One object a learner step (sinks.py)."""
        self.events = path / "events.jsonl"
        """One object a group (group_events.py)."""
        self.rollouts = path / "rollouts.jsonl.zst"
        """Sampled rollouts (rollout_log.py)."""
        self.trace = path / "trace.json"
        """Chrome/Perfetto trace (trace.py)."""
        self.summary = path / "summary.json"
        """The run in figures (summary.py)."""
        self.report = path / "report.html"
        """The run at a glance (report.py)."""
        self.journal = path / "journal"
        """The replay actor's journal."""
        self.checkpoints = path / "checkpoints"
        """Hugging Face folders and snapshots."""
        self.logs = path / "logs"
        """What the processes print."""
        self.tensorboard = path / "tensorboard"
        """TensorBoard's event files, when asked for."""

    @classmethod
    def create(
        cls, path: str | Path = "", *, resume: bool = False, overwrite: bool = False, config: str | None = None
    ) -> RunDirectory:
        """Make or reopen the directory of a run, point `latest` beside it to it, and lock it.

        Args:
            path: where; empty: `runs/grpo-<time>` under the working directory.
            resume: continue in the directory, which must be a run's.
            overwrite: delete the directory first, which must be a run's or empty.
            config: text of config.yaml; None leaves the file alone.

        Raises ConfigError, in one sentence, when the path cannot be used so.
        """
        if resume and overwrite:
            raise ConfigError("run.resume and run.overwrite exclude each other: set one of them.")
        if not str(path):
            if resume:
                raise ConfigError("run.resume=true needs run.dir, the directory of the run to continue.")
            path = default_path()
        path = Path(path).expanduser().resolve()
        try:
            return cls._create(path, resume, overwrite, config)
        except OSError as error:
            raise ConfigError(f"run.dir={path} cannot be used: {error.strerror or error}.") from error

    @classmethod
    def _create(cls, path: Path, resume: bool, overwrite: bool, config: str | None) -> RunDirectory:
        directory = cls(path)
        if resume:
            _check_resumable(path)
        elif os.path.lexists(path):
            _check_replaceable(path, overwrite)
            _remove(path)
        path.mkdir(parents=True, exist_ok=resume)
        directory._lock = _lock(path)
        if config is not None:
            write_atomically(directory.config, config)
        for name in SUBDIRECTORIES:
            (path / name).mkdir(exist_ok=True)
        _point_latest(path)
        return directory

    def write_config(self, text: str) -> None:
        """Replace config.yaml."""
        write_atomically(self.config, text)

    def close(self) -> None:
        """Let go of the lock; the files stay. A second call does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def default_path(kind: str = "grpo", parent: str | Path = "runs") -> Path:
    """`runs/<kind>-<local time>`, with a number behind it when two runs start in the same second."""
    base = Path(parent) / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 2
    while os.path.lexists(path):
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole: a reader sees the old text or the new, also when the writer is killed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8", errors="replace")
    temporary.replace(path)


def looks_like_run(path: Path) -> bool:
    """True for a directory with a run's config.yaml and subdirectories that is no repository of someone's work."""
    return (
        (path / "config.yaml").is_file()
        and all((path / name).is_dir() for name in SUBDIRECTORIES)
        and not (path / ".git").exists()
    )


def _check_resumable(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"run.dir={path} does not exist, so that there is nothing to resume; leave out run.resume.")
    if not looks_like_run(path):
        raise ConfigError(f"run.dir={path} is not the directory of a run, so that it cannot be resumed.")


def _check_replaceable(path: Path, overwrite: bool) -> None:
    if not overwrite:
        raise ConfigError(
            f"run.dir={path} exists; give another run.dir, run.resume=true to continue it, or run.overwrite=true."
        )
    empty = path.is_dir() and not any(path.iterdir())
    if not empty and not looks_like_run(path):
        raise ConfigError(
            f"run.dir={path} does not look like the directory of a run, so that run.overwrite=true will not delete it; "
            "give another run.dir or delete it yourself."
        )


def _remove(path: Path) -> None:
    """Delete a checked directory; renamed first, so that a half-deleted one never stands under the run's name."""
    lock = _lock(path)
    try:
        doomed = path.with_name(f".{path.name}.deleted-{os.getpid()}-{time.time_ns()}")
        path.rename(doomed)
        shutil.rmtree(doomed)
    finally:
        os.close(lock)


def _lock(path: Path) -> int:
    """Lock a directory against other writers; the lock ends with the returned descriptor or the process."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"run.dir={path} is in use by a run that has not ended; stop it or give another run.dir."
        ) from None
    except OSError:
        pass  # a file system without locks: the run goes on without this protection
    return descriptor


def _point_latest(path: Path) -> None:
    """Point the symbolic link `latest` beside a run to it; a real file of that name is left alone."""
    link = path.with_name("latest")
    if path.name == "latest" or (os.path.lexists(link) and not link.is_symlink()):
        return
    temporary = path.with_name(f".latest.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.name, target_is_directory=True)
        temporary.replace(link)
    except OSError:
        pass  # a file system without symbolic links: a convenience, no more
