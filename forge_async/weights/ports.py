"""What the weight plane asks of a transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from forge_async.weights.transports import Transport


class WeightStore(Protocol):
    """A key-value store of flat tensors and small objects, shared by the processes of a run: one transport's client.

    A call costs about a millisecond whatever it carries, so calls take many keys at once.
    """

    @property
    def transport(self) -> Transport:
        """What carries the bytes, and what it can do."""
        ...

    @property
    def carried_by(self) -> str:
        """Name of the transport that brought what was read last, where a client has several."""
        ...

    async def reserve(self, num_bytes: int) -> Any:
        """Writable memory, uint8 [num_bytes], from which `put` need not copy. Given back by being put.

        It is never that of what was put last and not deleted: whoever kept a view of that may read it, should the store
        die, until something else is put.
        """
        ...

    async def put(self, items: Mapping[str, Any], forget: Sequence[str] = ()) -> None:
        """Store values (flat uint8 tensors, or small picklable objects) under keys, in their order, then `delete` each
        prefix of `forget`.

        A tensor that `reserve` gave belongs to the store from then on; others are copied.
        """
        ...

    def reading(self, keys: Sequence[str]) -> AbstractAsyncContextManager[list[Any]]:
        """Enter to get what is stored. Raises KeyError, with the key, for the first that is not there.

        Tensors may be the store's own memory: they must not be written to, nor used after the exit. Until then they
        stay as they are, whatever is deleted or put meanwhile.
        """
        ...

    async def delete(self, prefix: str) -> None:
        """Forget all keys that begin so, manifests first. None is no error."""
        ...

    async def keys(self) -> list[str]:
        """All keys, in no order."""
        ...

    async def close(self) -> None:
        """Let go of what this client holds."""
        ...
