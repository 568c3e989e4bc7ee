"""Models as folders: `python -m forge_async.apps.model smollm2 [--to DIR]` makes one, `... check FOLDER` checks one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_async.apps.arguments import Parser, path
from forge_async.apps.exit import guarded_main
from forge_async.backends import smollm2
from forge_async.core.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code: 0 done, 1 the learner differs from transformers, 2 bad usage."""
    return guarded_main(lambda: _main(parse(sys.argv[1:] if argv is None else argv)))


def _main(options: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.what == "check":
        return check(options.folder)
    folder = make_smollm2(options.to or smollm2.cached_folder())
    return 0 if options.no_check else check(folder)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Raises ConfigError."""
    parser = Parser(prog="python -m forge_async.apps.model", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True, metavar="{smollm2,check}")
    make = commands.add_parser("smollm2", help="write SmolLM2-135M-Instruct as a Hugging Face folder, then check it")
    make.add_argument(
        "--to", type=path, help="the folder; without it, one in the cache, which model.path=smollm2 means"
    )
    make.add_argument("--no-check", action="store_true", help="do not compare the learner with transformers")
    compared = commands.add_parser("check", help="compare the learner's logits with those of transformers")
    compared.add_argument("folder", type=path, help="a Hugging Face folder of a supported architecture")
    return parser.parse_args(argv)


def make_smollm2(folder: Path) -> Path:
    """Convert the model unless `folder` holds it already."""
    if smollm2.is_converted(folder):
        print(f"{folder} holds the converted model already.")
        return folder
    print(f"Converting SmolLM2-135M-Instruct to {folder} (538 MB, half a minute) ...", flush=True)
    smollm2.convert(folder)
    print(f"Written: {folder}")
    return folder


def check(folder: Path) -> int:
    """Print the difference between learner and transformers; returns 0 when it is small enough, else 1."""
    from forge_async.backends.parity import TOLERANCE, compare

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no config.json, so it is no model; give a Hugging Face folder.")
    print("Comparing the learner's logits with those of transformers ...", flush=True)
    found = compare(folder)
    verdict = "ok" if found.holds else "NOT OK"
    print(
        f"{verdict}: largest difference {found.logits_diff_max:.2g} (at most {TOLERANCE:g}) in logits up to "
        f"{found.logits_max:.1f}, over {found.num_tokens} tokens"
    )
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
