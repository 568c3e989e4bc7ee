"""Broadcast as a transport: another store holds every version, and its bytes are sent ahead to who has read before.

So there is always something to pull: a reader that comes late, was left out, or whose group broke reads the same value
from the store below. Under the key of a large tensor lies a note that says who sends it, to whom, under which number;
the bytes themselves lie beside it. The note's number makes a value its own: one put again is never mistaken for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from forge_async.backends.broadcast_ends import BROKEN, Limits, Member, Sender, Sending
from forge_async.backends.broadcast_group import Meeting
from forge_async.core.errors import one_sentence
from forge_async.weights.ports import WeightStore
from forge_async.weights.transports import BROADCAST
from forge_async.weights.warm_memory import WarmMemory

log = logging.getLogger(__name__)

LARGE_BYTES = 32 << 10
"""Smaller tensors are read where they are stored: to tell a group of them takes as long."""
WHOLE = ".whole"
"""After a key: where the bytes lie that a note stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What is stored under the key of a large tensor."""

    sender: int
    number: int
    """Ascending for each sender."""
    audience: tuple[int, ...]
    """The members who are sent it."""


class BroadcastStore:
    """A client that sends what it puts, and receives what others put once it has read something of theirs."""

    transport = BROADCAST

    def __init__(
        self,
        base: WeightStore,
        meeting: Meeting,
        *,
        backend: str,
        limits: Limits,
        on_sent: Callable[[Sending], None] | None = None,
    ) -> None:
        """Args:
        base: holds all values.
        meeting: where senders and members meet.
        backend: `gloo` or `nccl`.
        limits: how long they wait for each other.
        on_sent: told of each broadcast when it has ended, well or not.
        """
        self._base, self._limits = base, limits
        self._open_sender = lambda: Sender(meeting, backend, limits)
        self._open_member = lambda sender: Member(meeting, backend, sender, limits)
        self._on_sent = on_sent
        self._memory = WarmMemory()
        self.carried_by = base.transport.name
        self._sender: Sender | None = None
        self._members: dict[int, Member] = {}
        self._numbers = itertools.count(1)
        self._putting, self._joining = asyncio.Lock(), asyncio.Lock()
        self._sending: asyncio.Task[None] | None = None

    async def reserve(self, num_bytes: int) -> torch.Tensor:
        return await self._base.reserve(num_bytes)

    async def put(self, items: Mapping[str, Any], forget: Sequence[str] = ()) -> None:
        large = [key for key, value in items.items() if _is_large(value)]
        if not large:
            await self._base.put(items, forget)
            return
        async with self._putting:
            sender, audience = await self._audience()
            notes = {key: Note(sender=sender, number=next(self._numbers), audience=audience) for key in large}
            own = {} if self._base.transport.is_shared or not audience else {key: items[key].clone() for key in large}
            await self._base.put(dict(_with_notes(items, notes)), forget)
            if audience:
                await self._set_off(notes, own)

    @asynccontextmanager
    async def reading(self, keys: Sequence[str]) -> AsyncIterator[list[Any]]:
        async with AsyncExitStack() as held:
            values = await held.enter_async_context(self._base.reading(keys))
            notes = [place for place, value in enumerate(values) if isinstance(value, Note)]
            received = await asyncio.gather(*(self._received(values[place]) for place in notes))
            values = values[:]
            for place, value in zip(notes, received, strict=True):
                values[place] = value
            if missed := [place for place in notes if values[place] is None]:
                pulled = await self._pulled([keys[place] for place in missed])
                for place, value in zip(missed, pulled, strict=True):
                    values[place] = value
            if notes:
                self.carried_by = self._base.transport.name if missed else self.transport.name
            yield values

    async def delete(self, prefix: str) -> None:
        await self._base.delete(prefix)

    async def keys(self) -> list[str]:
        return [key for key in await self._base.keys() if not key.endswith(WHOLE)]

    async def settled(self) -> None:
        """Wait for the end of the broadcasts under way, well or not."""
        if self._sending is not None:
            await self._sending

    async def close(self) -> None:
        await self.settled()
        for member in self._members.values():
            await asyncio.to_thread(member.close)
        if self._sender is not None:
            await asyncio.to_thread(self._sender.close)
        await self._base.close()

    async def _audience(self) -> tuple[int, tuple[int, ...]]:
        """The sender's number, and to whom it sends the next value: nobody while it is busy with the last one."""
        if self._sender is None:
            self._sender = await asyncio.to_thread(self._open_sender)
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=self._limits.member_s)
            if not self._sending.done():
                log.warning("The next version is left to be pulled: the last one is still being broadcast.")
                return self._sender.id, ()
        try:
            return self._sender.id, await asyncio.to_thread(self._sender.audience)
        except BROKEN as error:
            log.warning("Versions are left to be pulled: %s", one_sentence(error))
            return self._sender.id, ()

    async def _set_off(self, notes: Mapping[str, Note], own: dict[str, torch.Tensor]) -> None:
        """Begin to send these values: copies of our own, or the store's memory, which a lease keeps as it is."""
        held = AsyncExitStack()
        if not own:
            try:
                values = await held.enter_async_context(self._base.reading([key + WHOLE for key in notes]))
            except KeyError:  # deleted already: nobody will ask for it
                return
            own = dict(zip(notes, values, strict=True))
        self._sending = asyncio.create_task(self._send(held, notes, own))

    async def _send(self, held: AsyncExitStack, notes: Mapping[str, Note], values: Mapping[str, torch.Tensor]) -> None:
        assert self._sender is not None, "only a sender has an audience"
        async with held:
            for key, note in notes.items():
                sending = await asyncio.to_thread(self._sender.send, note.number, values[key])
                if sending.error:
                    log.warning("%s is left to be pulled: %s", key, sending.error)
                if self._on_sent is not None:
                    self._on_sent(replace(sending, key=key))

    async def _received(self, note: Note) -> torch.Tensor | None:
        """What a note stands for, where this client is sent it; None where it is to be pulled."""
        if self._sender is not None and note.sender == self._sender.id:
            return None
        async with self._joining:
            if note.sender not in self._members:
                self._members[note.sender] = await asyncio.to_thread(self._open_member, note.sender)
        return await asyncio.to_thread(self._members[note.sender].take, note.number, note.audience)

    async def _pulled(self, keys: Sequence[str]) -> list[torch.Tensor]:
        """The bytes of these keys, in memory of this process, as what is received is."""
        try:
            async with self._base.reading([key + WHOLE for key in keys]) as values:
                return await asyncio.to_thread(self._own, values) if self._base.transport.is_shared else values
        except KeyError as error:
            raise KeyError(error.args[0].removesuffix(WHOLE)) from None

    def _own(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._memory.take(value.numel()).copy_(value) for value in values]


def _with_notes(items: Mapping[str, Any], notes: Mapping[str, Note]) -> list[tuple[str, Any]]:
    """What is stored, in order: the bytes of each large value before its note."""
    stored = []
    for key, value in items.items():
        stored += [(key + WHOLE, value), (key, notes[key])] if key in notes else [(key, value)]
    return stored


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() >= LARGE_BYTES
