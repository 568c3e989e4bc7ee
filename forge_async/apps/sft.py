"""`python -m forge_async.apps.sft [--config FILE ...] [key=value ...]`: supervised fine-tuning with the same learner.

Trains on demonstrations (`sft.data`, or the task's own prompts and answers) and writes a Hugging Face folder.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from forge_async.apps.exit import guarded_main
from forge_async.config import load
from forge_async.config.help import help_text
from forge_async.core.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    return guarded_main(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    config, options = load(argv)
    if options.help:
        print(help_text("sft"))
        return 0
    if config.run.resume:
        raise ConfigError("run.resume=true continues runs of apps.grpo only; leave it out here.")
    from forge_async.runtime.model_folder import resolve_model
    from forge_async.runtime.sft import run_sft

    folder = asyncio.run(run_sft(config, resolve_model(config), print))
    print(f"model: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
