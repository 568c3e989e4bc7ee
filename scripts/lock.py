"""Resolves requirements/cpu.in and cuda.in into cpu.lock and cuda.lock. Run through `make lock`.

Pins that still fit are kept; `--upgrade` takes the newest versions instead. Both locks are resolved for the oldest
Python that we support and for Linux on x86_64, whatever machine this runs on. torch is left out of cpu.lock: its CPU
build is named in cpu-torch.txt and may need an index of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {
    "cpu": ["--excludes", "requirements/cpu-excludes.txt", "--no-emit-package", "torch"],
    "cuda": [],
}


def command(uv: str, stack: str, *, upgrade: bool) -> list[str]:
    """Return the command that resolves one stack."""
    return [
        *(uv, "pip", "compile", "--quiet", f"requirements/{stack}.in", "--output-file", f"requirements/{stack}.lock"),
        *("--overrides", "requirements/overrides.txt", "--excludes", "requirements/excludes.txt"),
        *("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"),
        *("--custom-compile-command", "make lock"),
        *OPTIONS[stack],
        *(["--upgrade"] if upgrade else []),
    ]


@contextlib.contextmanager
def uv_command() -> Iterator[str]:
    """Yield the path of uv: the one beside this Python, else one in a throw-away environment."""
    beside = Path(sys.executable).parent / "uv"
    if beside.exists():
        yield str(beside)
        return
    with tempfile.TemporaryDirectory() as folder:
        print("lock: installing uv for this call.", flush=True)
        venv.create(folder, with_pip=True)
        subprocess.run([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
        yield f"{folder}/bin/uv"


def main() -> int:
    parser = argparse.ArgumentParser(prog="lock", description="Regenerate requirements/cpu.lock and cuda.lock.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    upgrade = parser.parse_args().upgrade
    os.chdir(ROOT)
    try:
        with uv_command() as uv:
            for stack in OPTIONS:
                print(f"lock: resolving requirements/{stack}.lock.", flush=True)
                subprocess.run(command(uv, stack, upgrade=upgrade), check=True)
    except subprocess.CalledProcessError as error:
        print(
            f"lock: {Path(error.cmd[0]).name} failed, see above; the locks that it did not reach are unchanged.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("\nlock: interrupted; repeat it.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
