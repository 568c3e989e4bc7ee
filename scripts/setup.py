"""Makes the project's environment: a venv, torch, the locked packages, this package in editable form.

Run through `make setup` (scripts/setup.sh finds the Python). Standard library only, since it runs before anything is
installed. The steps can be interrupted and repeated: each skips what is done, and the stamp that says "complete" is
written last. The stamp holds a hash of what was installed, so that a changed lock is installed by the next call.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from setup_rules import (
    GIB,
    SetupError,
    explain,
    fingerprint,
    lack_of_space,
    read_pins,
    requirement_lines,
    stand_in_text,
    unsuited_machine,
)

ROOT = Path(__file__).resolve().parents[1]
STAMP_NAME = "forge_async_setup.json"
LOG_NAME = "setup.log"
PYTHONS = ((3, 11), (3, 13))
NEEDED_BYTES = {"cpu": 6 * GIB, "cuda": 15 * GIB}
NEEDED_TEMPORARY_BYTES = 2 * GIB

# Takes libnuma1 out of Debian's package, without root. The system's lists of packages may be missing, as in containers,
# or name a version that is gone; then lists of our own are fetched.
UNPACK_LIBNUMA = """
own() { apt-get -q -o "Dir::State::lists=$PWD/lists" -o "Dir::Cache=$PWD/cache" "$@"; }
apt-get -q download libnuma1 || { mkdir -p lists/partial cache && own update && own download libnuma1; }
dpkg-deb -x libnuma1_*.deb unpacked
"""

# Published as source only and compiled on installation; where there is no compiler, a stand-in lets the packages that
# import them load, and says what is missing when it is used.
COMPILED = {"pycosat": "reasoning-gym's zebra_puzzles"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is to be installed, and where."""

    stack: str
    """`cpu` or `cuda`: which lock."""
    venv: Path
    """The environment's folder."""
    torch_index: str
    """Package index of torch's CPU build, asked for torch alone and only when pip does not find it elsewhere."""

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def log(self) -> Path:
        return self.venv / LOG_NAME

    @property
    def stamp(self) -> Path:
        return self.venv / STAMP_NAME

    @property
    def lock(self) -> Path:
        return ROOT / "requirements" / f"{self.stack}.lock"

    @property
    def torch(self) -> Path | None:
        """File with torch's own pin, for the stack whose lock leaves torch out."""
        return ROOT / "requirements" / "cpu-torch.txt" if self.stack == "cpu" else None


def main(arguments: list[str] | None = None) -> int:
    """Bring the environment up to date; returns 0 when complete, 1 after a sentence on stderr, 130 when interrupted."""
    plan = parse(arguments)
    try:
        if not is_complete(plan):
            with alone():
                set_up(plan)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the same command completes it.", file=sys.stderr)
        return 130
    return 0


def parse(arguments: list[str] | None) -> Plan:
    parser = argparse.ArgumentParser(prog="setup", description="Make the project's environment from a lock.")
    parser.add_argument("--stack", choices=sorted(NEEDED_BYTES), default="cpu")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch-index", default=os.environ.get("TORCH_CPU_INDEX", ""))
    options = parser.parse_args(arguments)
    return Plan(stack=options.stack, venv=options.venv.absolute(), torch_index=options.torch_index)


def set_up(plan: Plan) -> None:
    """Do what is missing, step by step; the stamp comes last."""
    start_s = time.monotonic()
    if is_complete(plan):
        return  # another set-up, which this one waited for, has done it
    sentence = unsuited_machine(system=platform.system(), machine=platform.machine())
    if sentence:
        raise SetupError(sentence)
    check_space(plan)
    make_venv(plan)
    plan.log.write_text("")
    pins = read_pins(plan.lock.read_text())
    run_pip(plan, "the installer", ["--no-deps", *(f"{name}=={pins[name]}" for name in ("pip", "setuptools"))])
    install_torch(plan)
    install_lock(plan, pins)
    install_compiled(plan, pins)
    run_pip(plan, "forge_async itself", ["--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    provide_libnuma(plan)
    write_stamp(plan)
    say(f"complete in {time.monotonic() - start_s:.0f} s ({plan.venv}).")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the lock that lets one set-up at a time work on this checkout; waits for the one before."""
    with Path(__file__).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of this checkout to end.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def expected_fingerprint(plan: Plan) -> str:
    return fingerprint(
        stack=plan.stack,
        python=venv_version(plan) or "",
        root=str(ROOT),
        lock=plan.lock.read_text(),
        torch=plan.torch.read_text() if plan.torch else "",
        pyproject=(ROOT / "pyproject.toml").read_text(),
    )


def is_complete(plan: Plan) -> bool:
    try:
        return json.loads(plan.stamp.read_text())["fingerprint"] == expected_fingerprint(plan)
    except (OSError, ValueError, KeyError):
        return False


def write_stamp(plan: Plan) -> None:
    half = plan.stamp.with_suffix(".part")
    half.write_text(json.dumps({"stack": plan.stack, "fingerprint": expected_fingerprint(plan)}) + "\n")
    half.replace(plan.stamp)


def check_space(plan: Plan) -> None:
    present = folder_bytes(plan.venv)
    places = [(plan.venv.parent, present, NEEDED_BYTES[plan.stack])]
    temporary = Path(tempfile.gettempdir())
    if temporary.stat().st_dev != plan.venv.parent.stat().st_dev:
        places.append((temporary, 0, NEEDED_TEMPORARY_BYTES))
    for place, there, needed in places:
        free = shutil.disk_usage(place).free
        # A set-up that only has to be brought up to date still needs room for what changes.
        sentence = lack_of_space(free=free, present=min(there, needed - GIB), needed=needed, place=str(place))
        if sentence:
            raise SetupError(sentence)


def folder_bytes(folder: Path) -> int:
    return sum(
        entry.lstat().st_size for parent, _, names in os.walk(folder) for entry in (Path(parent, n) for n in names)
    )


def venv_version(plan: Plan) -> str | None:
    """Return the version (`3.11`) of the environment's Python, or None when it does not start."""
    command = [str(plan.python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def make_venv(plan: Plan) -> None:
    """Make the environment, or complete one that an interrupted set-up left without pip."""
    version = venv_version(plan)
    if version is None:
        say(f"making {plan.venv} with Python {platform.python_version()}.")
        run_plain(plan, [sys.executable, "-m", "venv", "--clear", str(plan.venv)])
    elif not PYTHONS[0] <= tuple(map(int, version.split("."))) <= PYTHONS[1]:
        raise SetupError(
            f"{plan.venv} holds Python {version}, which the stack has no packages for; delete it and repeat."
        )
    forget_unfinished(plan)
    if subprocess.run([plan.python, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        run_plain(plan, [str(plan.python), "-m", "ensurepip"])


def run_plain(plan: Plan, command: list[str]) -> None:
    """Run a step that needs no network."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        output = " ".join((done.stdout + done.stderr).split())
        raise SetupError(f"the environment in {plan.venv} could not be made: {output[-300:] or 'no reason given'}")


def site_packages(plan: Plan) -> Path:
    return plan.venv / "lib" / f"python{venv_version(plan)}" / "site-packages"


def forget_unfinished(plan: Plan) -> None:
    """Remove the records of packages whose installation was cut short, so that pip installs them again.

    pip copies a package's files first and writes INSTALLER near the end; it takes a package whose record lacks it for
    an installed one.
    """
    for record in site_packages(plan).glob("*.dist-info"):
        if not (record / "INSTALLER").exists():
            shutil.rmtree(record)
    for leftover in site_packages(plan).glob("~*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def install_torch(plan: Plan) -> None:
    """Install torch's CPU build from wherever pip finds it, else from PyTorch's index, asked for nothing else."""
    if plan.torch is None:
        return  # cuda.lock holds torch itself
    pin = plan.torch.read_text().strip()
    wanted = ["--no-deps", pin]
    try:
        run_pip(plan, pin, ["--retries", "2", *wanted])
    except SetupError:
        if not plan.torch_index:
            raise
        run_pip(plan, f"{pin} from PyTorch's own index", ["--retries", "2", "--index-url", plan.torch_index, *wanted])


def install_lock(plan: Plan, pins: dict[str, str]) -> None:
    """Install every pinned package as it stands: the lock is complete, so nothing is resolved here."""
    selected = plan.venv / "locked.txt"
    selected.write_text(requirement_lines(pins, without=COMPILED))
    what = f"{len(pins)} locked packages (some minutes)"
    run_pip(plan, what, ["--no-deps", "--no-build-isolation", "-r", str(selected)], num_packages=len(pins))


def install_compiled(plan: Plan, pins: dict[str, str]) -> None:
    """Install what has to be compiled, or its stand-in where that is not possible."""
    for name, feature in COMPILED.items():
        stand_in = site_packages(plan) / f"{name}.py"
        try:
            if not has_compiler():
                raise SetupError("no C compiler, or no Python headers")
            run_pip(plan, name, ["--no-deps", "--no-build-isolation", f"{name}=={pins[name]}"])
            stand_in.unlink(missing_ok=True)
        except SetupError as error:
            stand_in.write_text(stand_in_text(name, feature))
            say(f"{name} was not compiled, so {feature} will be missing ({error}).")


def has_compiler() -> bool:
    compiler = shutil.which("cc") or shutil.which("gcc")
    return bool(compiler) and Path(sysconfig.get_paths()["include"], "Python.h").exists()


def provide_libnuma(plan: Plan) -> None:
    """See to libnuma, the one library of the system that vLLM's CPU build needs and a small Debian lacks.

    Without root the library is taken out of Debian's package and kept in the environment, whose Python then loads it
    at its start (vLLM finds a library that is loaded already).
    """
    kept = plan.venv / "lib" / "libnuma.so.1"
    loader = site_packages(plan) / "forge_async_libnuma.pth"
    if plan.stack != "cpu" or loads("libnuma.so.1") or (loader.exists() and loads(str(kept))):
        return
    say("libnuma is not on this system; fetching Debian's package of it into the environment.")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["sh", "-c", UNPACK_LIBNUMA], cwd=folder, capture_output=True, check=False)
        found = sorted(Path(folder).glob("unpacked/**/libnuma.so.1"))
        if not found:
            raise SetupError(
                "vLLM's CPU build needs libnuma.so.1 (Debian, Ubuntu: apt-get install libnuma1); install it and repeat."
            )
        shutil.copyfile(found[0].resolve(), kept)
    loader.write_text(f"import ctypes; ctypes.CDLL({str(kept)!r}, mode=ctypes.RTLD_GLOBAL)\n")


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# --- running pip -----------------------------------------------------------------------------------------------------


def run_pip(plan: Plan, what: str, arguments: list[str], *, num_packages: int = 0) -> None:
    """Run `pip install` in the environment; its output goes to the log, a short account of it to the terminal."""
    say(f"installing {what}.")
    command = [str(plan.python), "-m", "pip", "install", "--progress-bar", "off", *arguments]
    environment = {**os.environ, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    output: list[str] = []
    with plan.log.open("a") as log, started(command, environment) as process:
        log.write(f"\n$ {' '.join(command)}\n")
        for line in process.stdout or ():
            log.write(line)
            log.flush()
            output.append(line)
            if num_packages:
                show_progress(output, num_packages)
    if process.returncode:
        raise SetupError(f"{what} could not be installed: {explain(''.join(output))} (log: {plan.log}).")


@contextlib.contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a child and end with it: interrupted, it gets 5 s to tidy up (Ctrl-C reaches it too)."""
    process = subprocess.Popen(
        command, env=environment, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield process
        process.wait()
    except BaseException:
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        raise


def show_progress(output: list[str], num_packages: int) -> None:
    """Say now and then how far pip is: every 50 packages collected, and when it begins to unpack them."""
    line = output[-1]
    if line.startswith("Installing collected packages"):
        say("  all collected, unpacking them.")
    elif line.startswith("Collecting"):
        num_collected = sum(1 for earlier in output if earlier.startswith("Collecting"))
        if num_collected % 50 == 0:
            say(f"  {num_collected} of {num_packages} collected.")


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
