"""`python -m forge_async.apps.grpo [--config FILE ...] [key=value ...]`: train with GRPO on the real stack."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_async.apps.exit import DONE, FAILED, INTERRUPTED, guarded_main, show_traceback
from forge_async.config import Config, load
from forge_async.config.help import help_text
from forge_async.core.errors import ForgeError, one_sentence, unwrap
from forge_async.observe.progress import Progress
from forge_async.observe.report import write_report
from forge_async.observe.rewind import rewind
from forge_async.observe.run_directory import RunDirectory, default_path
from forge_async.observe.summary import RunFacts, write_summary

if TYPE_CHECKING:
    from forge_async.runtime.launch import Launch
    from forge_async.runtime.resume import ResumePoint


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted."""
    begun_s = time.time() - time.process_time()
    return guarded_main(lambda: _main(sys.argv[1:] if argv is None else argv, begun_s))


def _main(argv: Sequence[str], begun_s: float) -> int:
    config, options = load(argv)
    if options.help:
        print(help_text("grpo"))
        return DONE
    if options.dry_run:
        from forge_async.runtime.dry_run import describe

        print(describe(config))
        return DONE
    return _train(config, begun_s)


def _train(config: Config, begun_s: float) -> int:
    from forge_async.runtime.preflight import check_before_start, check_machine

    check_machine(config)  # at once: what follows imports the packages, and fetches a model or makes one
    from forge_async.runtime.launch import Launch
    from forge_async.runtime.model_folder import resolve_model
    from forge_async.runtime.resume import find_resume_point, note_resume

    resolving_s = time.time()
    model_folder = resolve_model(config)
    begun_s += time.time() - resolving_s  # fetching a model, or making a warm start, happens once and is not the run's
    check_before_start(config, model_folder)
    path = config.run.dir or str(default_path("grpo"))
    config = config.replace({"run.dir": path})
    directory = RunDirectory.create(path, resume=config.run.resume, overwrite=config.run.overwrite)
    resume = find_resume_point(directory, config.root.steps) if config.run.resume else None
    if resume is not None:
        note_resume(directory, resume)
        rewind(directory, resume.version.step, resume.ended)
    directory.write_config(config.replace({"run.resume": False, "run.overwrite": False}).to_yaml())
    bound = config.asynchrony.highest_staleness
    progress = Progress(config.root.steps, sys.stdout, mode=config.run.progress, max_staleness=bound)
    progress.say(f"run directory: {directory.path}")
    if resume is not None:
        progress.say(_where_it_goes_on(resume))
    launch = Launch(config, model_folder, directory, progress, begun_s, resume)
    status, error, code = _run(launch)
    facts = RunFacts(
        status=status,
        error=error,
        wall_s=time.time() - begun_s + (resume.earlier_s if resume else 0.0),
        startup_s=launch.startup_s,
        startup=launch.startup,
        max_staleness=bound,
        eval_before=launch.result.eval_before,
        eval_after=launch.result.eval_after,
        evaluations=launch.result.evaluations,
        best_checkpoint=str(best) if (best := launch.result.best_checkpoint) else None,
        last_checkpoint=str(last) if (last := launch.last_checkpoint) else None,
        resumed_at=resume.resumed_at if resume else (),
        groups=launch.result.groups,
        weights_sha256=launch.result.weights_sha256,
    )
    summary = write_summary(directory, facts)
    progress.finish(summary, write_report(directory))
    directory.close()
    return code


def _where_it_goes_on(resume: ResumePoint) -> str:
    if resume.checkpoint is None:
        return "resuming: no checkpoint was written yet, so the run begins again with its first step"
    return f"resuming after step {resume.version.step}, from {resume.checkpoint}"


def _run(launch: Launch) -> tuple[str, str | None, int]:
    """Run to the end; returns the status, the cause of a failure in one sentence, and the exit code."""

    async def interruptible() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await launch.run()

    try:
        asyncio.run(interruptible())
    except (KeyboardInterrupt, asyncio.CancelledError):
        return "interrupted", None, INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the boundary: whatever failed is told by name and exit code
        show_traceback(error)
        cause = unwrap(error)
        return "failed", one_sentence(error), cause.exit_code if isinstance(cause, ForgeError) else FAILED
    return "completed", None, DONE


if __name__ == "__main__":
    sys.exit(main())
