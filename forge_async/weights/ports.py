"""What the weight plane asks of a store."""

from __future__ import annotations

from typing import Any, Protocol


class WeightStore(Protocol):
    """A key-value store of tensors and small objects, shared by the processes of a run."""

    async def put(self, key: str, value: Any) -> None:
        """Store `value` (a flat uint8 tensor, or a small picklable object) under a fresh key."""
        ...

    async def get(self, key: str) -> Any:
        """Return what was stored. Raises KeyError for a key that is not there."""
        ...

    async def delete(self, key: str) -> None:
        """Forget a key. Raises KeyError for a key that is not there."""
        ...

    async def keys(self) -> list[str]:
        """All keys, in no order."""
        ...
