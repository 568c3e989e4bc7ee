"""What comes back from an endpoint: a value, or the user's exception as a value.

An exception that escapes an endpoint can end its actor (a Monarch concurrent endpoint, SystemExit in any) or be lost
when it does not pickle. So endpoints of a ForgeActor catch what the user's code raises and return it as a `Failure`,
which the caller's handle raises again.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from monarch._src.actor.endpoint import EndpointProperty
from monarch.actor import ActorError, concurrent_endpoint, endpoint

from forge_async.core.errors import ForgeError
from forge_async.core.loop_watch import LoopWatch

MARK = "_forge_guarded"


class RemoteError(ForgeError):
    """An endpoint raised an exception whose class this process does not know, or a call could not be carried out."""

    def __init__(self, message: str, *, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        """Name of the class of the exception that was raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception as a value."""

    module: str
    type_name: str
    message: str
    traceback: str
    pickled: bytes
    """The exception itself; empty when it does not survive pickling."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Wrap an exception that was caught in an endpoint."""
        kind = type(error)
        return cls(
            module=kind.__module__,
            type_name=kind.__qualname__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            pickled=_pickled(error),
        )

    def to_exception(self, where: str) -> BaseException:
        """The original exception where its class is loaded in this process, else a RemoteError with the same words.

        Classes are never imported for it: an error of vLLM must not load vLLM into the controller.
        """
        error = self._original() or RemoteError(f"{self.type_name}: {self.message}", type_name=self.type_name)
        error.add_note(f"raised in {where}; there:\n{self.traceback}")
        return error

    def _original(self) -> Exception | None:
        kind = getattr(sys.modules.get(self.module), self.type_name, None)
        if not self.pickled or kind in (None, StopIteration, StopAsyncIteration):  # those two cannot leave a coroutine
            return None
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001  an exception class with its own idea of pickling
            return None
        return error if isinstance(error, Exception) and type(error) is kind else None


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        return data if type(pickle.loads(data)) is type(error) else b""
    except Exception:  # noqa: BLE001  whatever a user's exception does when pickled
        return b""


def value_of(answer: Any, where: str) -> Any:
    """The value of an answer; raises what the endpoint raised."""
    if isinstance(answer, Failure):
        raise answer.to_exception(where)
    return answer


def from_actor_error(error: ActorError, where: str) -> BaseException:
    """What to raise for Monarch's own wrapping, which is met when arguments or results do not pickle."""
    cause = getattr(error, "exception", None) or error
    result = RemoteError(f"{type(cause).__name__}: {cause}", type_name=type(cause).__name__)
    result.add_note(f"raised in {where}; there:\n{error}")
    return result


def guarded(prop: EndpointProperty) -> EndpointProperty:
    """The same endpoint, which returns the user's exceptions as values and runs plain `def` methods off the loop.

    Endpoints with an explicit response port stay as they are: their authors manage the port, and so the errors.
    """
    method = prop._method
    is_concurrent = hasattr(method, "_monarch_concurrent_endpoint_wrapper")
    user_method = method.__wrapped__ if is_concurrent else method
    if hasattr(user_method, MARK) or _takes_port(prop, is_concurrent):
        return prop
    if "timeout_s" in inspect.signature(user_method).parameters:
        raise TypeError(
            f"Endpoint {user_method.__qualname__} has a parameter timeout_s, which callers already use for the call's "
            "own deadline; give it another name."
        )
    wrap: Any = concurrent_endpoint if is_concurrent else endpoint
    return wrap(_guard(user_method), propagate=prop._propagator, instrument=prop._instrument)


def _takes_port(prop: EndpointProperty, is_concurrent: bool) -> bool:
    if not is_concurrent:
        return prop._explicit_response_port
    # Monarch gives every concurrent endpoint a port, and adds it to the signature where the author did not ask for it.
    return not any(name.startswith("_monarch_response_port") for name in inspect.signature(prop._method).parameters)


def _guard(method: Callable[..., Any]) -> Callable[..., Any]:
    run = method if inspect.iscoroutinefunction(method) else _on_worker_thread(method)

    @functools.wraps(method)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_forge_loop_watch" not in self.__dict__:
            self._forge_loop_watch = LoopWatch(f"{type(self).__name__} (pid {os.getpid()})", _warn).start()
        try:
            return await run(self, *args, **kwargs)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the actor is being stopped
            return Failure.of(error)
        except BaseException as error:  # noqa: BLE001  SystemExit of a user's function must not end the actor either
            return Failure.of(error)

    setattr(wrapper, MARK, True)
    return wrapper


def _warn(text: str) -> None:
    """To the process's log."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _on_worker_thread(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a plain method on the actor's one worker thread, so that the actor's loop stays free to answer."""

    def in_thread(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001  a StopIteration, for one, cannot cross to the loop
            return Failure.of(error)

    async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        pool = self.__dict__.get("_forge_worker")
        if pool is None:
            pool = self.__dict__["_forge_worker"] = ThreadPoolExecutor(1, thread_name_prefix=type(self).__name__)
        call = functools.partial(contextvars.copy_context().run, in_thread, self, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    return run
