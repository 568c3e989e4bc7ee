"""Objects in a process of their own: what a real backend does to its process stays there.

vLLM replaces functions of torch and takes signals, torchtitan picks a device for the process: both want to be alone.
A `Child` builds objects by name and calls their methods; answers and errors come back, with its log when it dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Child:
    """A process that hosts objects. Calls wait `timeout_s` seconds at most."""

    def __init__(self, log: Path, *, env: Mapping[str, str] | None = None, timeout_s: float = 150.0) -> None:
        ours, theirs = socket.socketpair()
        self._log, self._timeout_s = log, timeout_s
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.child", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
                | dict(env or {}),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        theirs.close()
        self._connection = Connection(ours.detach())

    def build(self, factory: str, *args: Any, **kwargs: Any) -> Any:
        """Call `module:function` there and return a stand-in for what it returns."""
        return Remote(self, self.ask("build", factory, args, kwargs))

    def ask(self, *message: Any) -> Any:
        """Send a message and wait for its answer."""
        self.send(*message)
        return self.receive()

    def send(self, *message: Any) -> None:
        self._connection.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        if not self._connection.poll(self._timeout_s):
            raise TimeoutError(f"the child did not answer in {self._timeout_s:g} s; its log ends:\n{self._tail()}")
        try:
            value, error = pickle.loads(self._connection.recv_bytes())
        except EOFError:
            raise RuntimeError(f"the child died; its log ends:\n{self._tail()}") from None
        if error is not None:
            raise error
        return value

    def signal(self, number: int) -> None:
        """Send the process a signal: stop it, let it go on, kill it."""
        os.kill(self._process.pid, number)

    def close(self) -> None:
        """End the process and all that it started."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


class Remote:
    """Stands for an object of a child: attributes are asked for there, iterators come back as lists."""

    def __init__(self, child: Child, number: int) -> None:
        self._child, self._number = child, number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_method, value = self._child.ask("get", self._number, name)
        if not is_method:
            return value
        return lambda *args, **kwargs: self._child.ask("call", self._number, name, args, kwargs)


def call_all(remotes: Sequence[Remote], name: str, arguments: Sequence[tuple]) -> list[Any]:
    """Call a method on objects of several children at once, each with its own arguments: ranks wait for each other."""
    for remote, args in zip(remotes, arguments, strict=True):
        remote._child.send("call", remote._number, name, args, {})
    return _receive_all([remote._child for remote in remotes])


def build_all(children: Sequence[Child], factory: str, arguments: Sequence[tuple[tuple, dict]]) -> list[Remote]:
    """Build an object in each of several children at once."""
    for child, (args, kwargs) in zip(children, arguments, strict=True):
        child.send("build", factory, args, kwargs)
    numbers = _receive_all(children)
    return [Remote(child, number) for child, number in zip(children, numbers, strict=True)]


def _receive_all(children: Sequence[Child]) -> list[Any]:
    """The answers of all; raises an ExceptionGroup of the errors when there are any, after all have answered."""
    values, errors = [], []
    for child in children:
        try:
            values.append(child.receive())
        except Exception as error:  # noqa: BLE001  told together below
            errors.append(error)
    if errors:
        raise ExceptionGroup("children failed", errors)
    return values


class Host:
    """The child's side."""

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def build(self, factory: str, args: tuple, kwargs: dict) -> int:
        module, _, function = factory.partition(":")
        self._objects.append(getattr(importlib.import_module(module), function)(*args, **kwargs))
        return len(self._objects) - 1

    def get(self, number: int, name: str) -> tuple[bool, Any]:
        value = getattr(self._objects[number], name)
        return (True, None) if callable(value) else (False, value)

    def call(self, number: int, name: str, args: tuple, kwargs: dict) -> Any:
        value = getattr(self._objects[number], name)(*args, **kwargs)
        return list(value) if hasattr(value, "__next__") else value

    def serve(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError):
            while True:
                connection.send_bytes(self._answer(*pickle.loads(connection.recv_bytes())))

    def _answer(self, kind: str, *message: Any) -> bytes:
        try:
            return pickle.dumps((getattr(self, kind)(*message), None))
        except Exception as error:  # noqa: BLE001  belongs to whoever asked
            import traceback

            traceback.print_exc()
            return pickle.dumps((None, error))


PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    # A rank that waits for another would outlive a test session that is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    Host().serve(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)
