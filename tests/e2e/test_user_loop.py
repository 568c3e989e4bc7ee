"""The loop that users fork: short, whole, within the bound, and gone when it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from e2e.runs import descendants, environment, nothing_left, processes_of

MAIN = Path(__file__).parents[2] / "apps" / "grpo" / "main.py"
PAGE = MAIN.parents[2] / "docs" / "public_api.md"
STEPS = 3
LINE = re.compile(r"step +(\d+)  reward (\d\.\d+)  staleness (\d+)  tokens by version \{(.*)\}")


def start(tmp_path: Path, model: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(MAIN), "--model", str(model), f"run.dir={tmp_path / 'run'}", "group_size=4", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=environment(tmp_path),
        start_new_session=True,
    )  # fmt: skip


def test_the_loop_fits_on_three_screens() -> None:
    assert len(MAIN.read_text().splitlines()) <= 150


@pytest.mark.stack
@pytest.mark.timeout(300)
def test_the_loop_trains_within_the_bound_through_its_stores_death_and_leaves_nothing(
    tmp_path: Path, tiny_model: Path
) -> None:
    process = start(tmp_path, tiny_model, "--steps", str(STEPS), "groups_per_step=8", "async.max_staleness=1")
    assert process.stdout is not None
    lines, pids, store = [], set[int](), 0
    for line in process.stdout:
        lines.append(line)
        pids |= descendants(process.pid)
        if line.startswith("step   1 "):
            store = processes_of(tmp_path / "run")["store-0"]
            os.kill(store, signal.SIGKILL)
    assert process.wait(timeout=60) == 0, "".join(lines)
    assert len(pids) >= 5, "learner, policy, reward, replay and store have processes of their own"
    nothing_left(pids)
    steps = [found.groups() for line in lines if (found := LINE.fullmatch(line.rstrip()))]
    assert [int(step) for step, *_ in steps] == list(range(1, STEPS + 1)), "".join(lines)
    for step, reward, staleness, tokens in steps:
        made_by = [int(part.split(":")[0]) for part in tokens.split(",")]
        assert 0 <= float(reward) <= 1
        assert int(step) - 1 - min(made_by) == int(staleness) <= 1, "as old as the oldest token"
    told = [line for line in lines if "Another took its place" in line]
    assert len(told) == 1 and f"pid {store} " in told[0] and "SIGKILL" in told[0], "".join(lines)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "tmp").exists()


@pytest.mark.stack
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_learner_ends_the_loop_by_name(tmp_path: Path, tiny_model: Path) -> None:
    process = start(tmp_path, tiny_model, "--steps", "100000", "groups_per_step=8")
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if LINE.fullmatch(line.rstrip()):
            break
    pids = descendants(process.pid)
    victim = next(pid for pid in pids if log_of(pid).startswith("learner"))
    os.kill(victim, signal.SIGKILL)
    begun = time.monotonic()
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 1, "".join(lines) + rest
    assert f"pid {victim}" in rest.splitlines()[-1]
    assert time.monotonic() - begun < 30
    nothing_left(pids)


@pytest.mark.stack
@pytest.mark.timeout(120)
def test_every_code_block_of_the_page_on_the_public_api_runs_or_stands_in_the_loop(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    loop = MAIN.read_text()
    own = [block for block in blocks if block not in loop and textwrap.indent(block, "    ") not in loop]
    assert len(blocks) - len(own) == 4, "excerpts of main.py that main.py does not have"
    script = tmp_path / "page.py"
    script.write_text(RUN_BLOCKS.format(source="\n".join(own)))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=environment(tmp_path)
    )
    assert done.returncode == 0, done.stderr


RUN_BLOCKS = """
import ast, asyncio

SOURCE = r'''{source}'''

code = compile(SOURCE, "docs/public_api.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
asyncio.run(eval(code, globals()))
"""


def log_of(pid: int) -> str:
    """Name of the log that a process writes to."""
    return Path(f"/proc/{pid}/fd/1").readlink().name
