"""What a benchmark is asked to run, checked before the first process starts."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from forge_async.config import Config, load

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One call of the program."""

    words: tuple[str, ...]
    """Command-line words that every run gets: `--config NAME`, `key=value`."""
    config: Config
    """What they amount to, without the dials of a case."""
    folder: Path
    """Where the runs' directories go."""
    rounds: int
    """Runs of each case."""
    steps: int
    """Learner steps of a run."""
    cold: bool = True
    """Whether `start` measures a cold start too."""
    threads: tuple[int, ...] = ()
    """Threads of TRL's cases; none: one, and one for each core."""
    trace: Path | None = None
    """`rules`: an events.jsonl to play instead of the seeded trace."""
    only: str = ""
    """`overlap`, `objectives`: the one part to measure; "": all."""
    own_words: tuple[str, ...] = ()
    """What the user said of the configuration."""
    pairs: int = 0
    """`objectives`: paired seeds of asynchronous and synchronous runs."""
    out: Path | None = None
    """`objectives`, `overlap`: file of finished runs to go on with; None: a new one in the folder."""
    jobs: int = 0
    """`objectives`: engines at work at the same time; 0: one for each core."""
    num_bytes: float = 0.0
    """Size of the model of `weights`; 0: the bench's own."""
    tensors: tuple[int, ...] = ()
    """Its numbers of tensors, a model each; none: the bench's own."""

    @classmethod
    def of(
        cls,
        configs: Sequence[str],
        overrides: Sequence[str],
        *,
        folder: Path,
        rounds: int,
        steps: int,
        cold: bool = True,
        threads: Sequence[int] = (),
        only: str = "",
        trace: Path | None = None,
        num_bytes: float = 0.0,
        tensors: Sequence[int] = (),
        pairs: int = 0,
        out: Path | None = None,
        jobs: int = 0,
    ) -> Plan:
        """Check the configuration and put the words of every run in order. Raises ConfigError."""
        files = tuple(word for name in configs for word in ("--config", name))
        words = (*files, "eval.num_prompts=0", "checkpoint.every_steps=0", *overrides)
        return cls(
            words=words,
            config=load(words)[0],
            folder=folder,
            rounds=rounds,
            steps=steps,
            cold=cold,
            threads=tuple(threads),
            only=only,
            trace=trace,
            num_bytes=num_bytes,
            tensors=tuple(tensors),
            own_words=(*files, *overrides),
            pairs=pairs,
            out=out,
            jobs=jobs,
        )

    def model_folder(self, config: Config | None = None) -> Path:
        """The model of every run; the tiny warm start is made here when it is not in the cache, outside all timing.

        `config`: what the runs have in common, where a bench adds to the user's words.
        """
        return in_another_process(_model_folder, config or self.config)


def _model_folder(config: Config) -> Path:
    from forge_async.runtime.model_folder import resolve_model

    return resolve_model(config)


def in_another_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of a module in a fresh process, so that what it loads does not stay and disturb the timing."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()
