"""What a configuration names on this machine: the run directory, the model's folder, prompts and reward.

Nothing is imported or written here; what runs user code is `apps.check`.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from forge_async.config.schema import Config
from forge_async.observe.run_directory import looks_like_run


def prompts_are_there(config: Config) -> str | None:
    """`prompts` is a .jsonl file that can be read."""
    prompts = config.root.prompts
    if not prompts:
        return None
    path, remedy = Path(prompts), "give a .jsonl file with one prompt a line, or leave it out and give task.name."
    if path.suffix != ".jsonl":
        return f"prompts={prompts} is not a .jsonl file; {remedy}"
    if not path.is_file():
        return f"prompts={prompts} does not exist; {remedy}"
    return None if os.access(path, os.R_OK) else f"prompts={prompts} may not be read; {remedy}"


def reward_is_there(config: Config) -> str | None:
    """`reward` is file.py:function or package.module:function, and the file or package exists."""
    reward = config.root.reward
    return _reference_problem(f"reward={reward}", reward) if reward else None


def objective_is_there(config: Config) -> str | None:
    """An objective of the user's own is file.py:function or package.module:function, and the file or package exists."""
    name = config.objective.name
    return _reference_problem(f"objective.name={name}", name) if ":" in name else None


def _reference_problem(given: str, reference: str) -> str | None:
    """What keeps a reference to a function from being found; `given` is how the user wrote it, key and value."""
    place, colon, function = reference.rpartition(":")
    if not colon or not place or not function.isidentifier():
        return f"{given} names no function; write file.py:function or package.module:function."
    if place.endswith(".py") or "/" in place:
        return _function_in_file(given, Path(place), function)
    package = place.partition(".")[0]
    try:
        found = bool(package) and importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a spec, such as __main__
        found = False
    return None if found else f"{given}: there is no package {package}; install it, or give file.py:function."


def _function_in_file(given: str, path: Path, function: str) -> str | None:
    if not path.is_file():
        return f"{given}: the file {path} does not exist; give file.py:function with a file that does."
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}," if isinstance(error, SyntaxError) else ""
        return f"{given}: {path}{line} is not Python ({error.args[0]}); mend it."
    except OSError as error:
        return f"{given}: {path} cannot be read ({error.strerror}); give a file that can."
    names = _top_level_names(tree)
    if names is None or function in names:
        return None
    near = difflib.get_close_matches(function, names, n=1)
    remedy = f"did you mean {path}:{near[0]}?" if near else f"define {function}(...) there."
    return f"{given}: {path} defines no {function}; {remedy}"


def _top_level_names(tree: ast.Module) -> set[str] | None:
    """Names that a module binds at its top; None when a condition, a loop or a star makes that unknowable."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names |= {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
        elif not isinstance(node, ast.Expr):
            return None
    return None if "*" in names else names


def model_is_there(config: Config) -> str | None:
    """A model.path that looks like a folder of this machine is one, and holds a model."""
    path = config.model.path
    if not path:
        return None
    folder, remedy = Path(path), "give a Hugging Face folder, a hub name such as Qwen/Qwen3-0.6B, or smollm2."
    if not folder.exists():
        looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
        return f"model.path={path} does not exist; {remedy}" if looks_local else None
    if not folder.is_dir():
        return f"model.path={path} is a file, not a folder; {remedy}"
    if not (folder / "config.json").is_file():
        return f"model.path={path} holds no config.json, so it is no model; {remedy}"
    return None


def teacher_is_there(config: Config) -> str | None:
    """The teacher is a folder with a model."""
    teacher = config.objective.teacher
    if not teacher or (Path(teacher) / "config.json").is_file():
        return None
    return f"objective.teacher={teacher} is no folder with a config.json; give a Hugging Face folder on this machine."


def run_dir_is_free(config: Config) -> str | None:
    """The run directory does not exist yet, unless the user says what is to become of it."""
    run = config.run
    if not run.dir:
        return "run.resume=true needs run.dir, the folder of the run to continue." if run.resume else None
    path = Path(run.dir)
    if not path.exists():
        return f"run.dir={run.dir} does not exist, so nothing can go on there." if run.resume else _can_be_made(path)
    if not path.is_dir():
        return f"run.dir={run.dir} is a file; give another run.dir."
    if run.overwrite:
        return _may_be_deleted(path)
    if run.resume:
        return None if looks_like_run(path) else f"run.dir={run.dir} holds no run that could go on; give one's folder."
    return (
        f"run.dir={run.dir} exists already; give another run.dir, run.resume=true to continue it, "
        "or run.overwrite=true to delete it."
    )


def _can_be_made(path: Path) -> str | None:
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
        return None
    problem = "may not be written to" if parent.is_dir() else "is a file"
    return f"run.dir={path} cannot be made, because {parent} {problem}; give another run.dir."


def _may_be_deleted(path: Path) -> str | None:
    """Deleting is for runs: not for a folder that holds something else, nor for one that we stand in."""
    here, target = Path.cwd(), path.resolve()
    if target == here or target in here.parents:
        return f"run.overwrite=true would delete the folder you are in (run.dir={path}); give another run.dir."
    if any(path.iterdir()) and not looks_like_run(path):
        return f"run.overwrite=true would delete run.dir={path}, which holds no run; give another run.dir."
    return None


DISK_CHECKS: tuple[Callable[[Config], str | None], ...] = (
    prompts_are_there,
    reward_is_there,
    objective_is_there,
    model_is_there,
    teacher_is_there,
    run_dir_is_free,
)
"""Checks of what lies on disk, in the order in which they are told."""
