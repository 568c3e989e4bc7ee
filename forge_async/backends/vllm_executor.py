"""vLLM's executor for ranks that live elsewhere, such as in Monarch actors. Written against vLLM 0.32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import cloudpickle
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_file_store_init_method
from vllm.v1.executor.abstract import Executor

from forge_async.weights.reshard import Wanted


class Ranks(Protocol):
    """The ranks of an engine, from the engine's thread: each call is made on all of them, and waits for all."""

    num_ranks: int

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `VllmRank`; the results in order of rank. Raises ActorDiedError when one has died."""
        ...

    def call_later(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Begin a call; what is returned waits for it."""
        ...


_building: ContextVar[Ranks] = ContextVar("ranks of the engine that is being built")


@contextmanager
def on_ranks(ranks: Ranks) -> Iterator[None]:
    """Around the making of an engine: its executor gets these ranks.

    vLLM wants a class, which its configuration carries to the ranks; so the class itself can hold none.
    """
    token = _building.set(ranks)
    try:
        yield
    finally:
        _building.reset(token)


class RanksExecutor(Executor):
    """Sends every call to all ranks; of a step's results only the first rank's come back."""

    def _init_executor(self) -> None:
        self.ranks = _building.get()
        blob = cloudpickle.dumps((self.vllm_config, get_file_store_init_method()))
        self.held: list[list[Wanted]] = self.ranks.call("build", blob)
        """What each rank holds of the model."""
        current_platform.update_block_size_for_backend(self.vllm_config)

    def collective_rpc(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a worker's method on all ranks. The ranks have deadlines of their own in place of `timeout`."""
        later = self._begin(method, args, kwargs, everyone=True)
        return _Later(later) if non_block else later()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run one step on all ranks."""
        return self._of_first("execute_model", scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Sample after a step."""
        return self._of_first("sample_tokens", grammar_output, non_block)

    def check_health(self) -> None:
        """Deaths are noticed by whoever waits for a call."""

    def shutdown(self) -> None:
        """The ranks belong to whoever started them."""

    def _of_first(self, method: str, argument: Any, non_block: bool) -> Any:
        later = self._begin(method, (argument,), None, everyone=False)
        return _Later(lambda: later()[0]) if non_block else later()[0]

    def _begin(self, method: Any, args: tuple, kwargs: Any, *, everyone: bool) -> Callable[[], list[Any]]:
        later = self.ranks.call_later("run", cloudpickle.dumps((method, args, kwargs or {})), everyone)
        return lambda: [cloudpickle.loads(each) for each in later()]


class _Later(Future):
    """A result that is waited for when it is asked for."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self._wait = wait

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            try:
                self.set_result(self._wait())
            except Exception as error:  # noqa: BLE001  raised below, to whoever asks
                self.set_exception(error)
        return super().result()
