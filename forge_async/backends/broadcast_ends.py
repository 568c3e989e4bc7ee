"""Both ends of a broadcast: the sender (a learner rank), and one of its audience (a policy replica, or its ranks).

Each sender has a group of its own, so learner ranks need not agree on an order. What is to happen is told through the
meeting point, in mail that each member gets in order; the bytes go through the group. Mail is JSON and never pickled,
since whoever reaches the meeting point could write some.

    joined/<s>  here/<s>/<round>/<m>  member/<s>/<m>  mail/<s>/<m>      s: sender, m: member, both numbered from 1
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from forge_async.actors.liveness import Process
from forge_async.backends.broadcast_group import Meeting, Wire, broadcast, join_group, leave
from forge_async.core.errors import ForgeError, one_sentence
from forge_async.weights.audience import Audience
from forge_async.weights.inbox import Inbox
from forge_async.weights.warm_memory import WarmMemory

log = logging.getLogger(__name__)

CALL, FORM, SEND, MISS, DROPPED, END = "call", "form", "send", "miss", "dropped", "end"
"""Kinds of mail: answer; form a group; receive; it will not come; you are no member any more; stop listening."""
IDLE_S = 3600.0
"""A member looks for mail again after so long without any; nothing depends on it."""
SENDERS = "senders"
BROKEN = (RuntimeError, ForgeError, OSError)
"""What gloo, NCCL and the meeting point raise when a member or the store is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long the ends wait for each other."""

    member_s: float
    """For a member that does not answer, or does not take what is sent."""
    total_s: float
    """For a whole broadcast, however much moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """What became of a broadcast, as its sender saw it."""

    key: str = ""
    started_s: float
    """Wall clock."""
    duration_s: float
    num_bytes: int
    num_members: int
    """Who received it; 0 when it broke off."""
    error: str = ""
    """Why it broke off."""

    @property
    def failure(self) -> str:
        """What broke off, and why, in a sentence; "" when nothing did."""
        return f"The broadcast of {self.key} broke off: {self.error}" if self.error else ""


class Sender:
    """Sends blobs to whoever has joined. One call at a time, from any thread."""

    def __init__(self, meeting: Meeting, backend: str, limits: Limits) -> None:
        """Raises WeightsError when the meeting point is not reached."""
        self._meeting, self._backend, self._limits = meeting, backend, limits
        self._store = meeting.connect()
        self.id = self._store.add(SENDERS, 1)
        """Its number."""
        self._audience = Audience()
        self._processes: dict[int, Process] = {}
        self._wire: Wire | None = None
        self._round = 0

    def audience(self) -> tuple[int, ...]:
        """The members who will be sent what is sent next: all who joined, without those who are known to be dead."""
        for member in self._audience.unknown(self._store.add(f"joined/{self.id}", 0)):
            if not self._store.check([f"member/{self.id}/{member}"]):
                break  # it is just joining; next time
            self._processes[member] = _process(self._store.get(f"member/{self.id}/{member}"))
            self._audience.add(member)
        self._drop([each for each, who in self._processes.items() if who.is_local and not who.is_running()])
        return self._audience.members

    def send(self, number: int, blob: torch.Tensor) -> Sending:
        """Send a blob, uint8 [bytes]. Who dies or stalls keeps it from none of the others for longer than the limits,
        nor from what comes next; that it broke off is told in what is returned, and never raised."""
        started_s, begun = time.time(), time.monotonic()
        error, num_members = "", 0
        try:
            wire = self._group()
            if wire is not None:
                self._post(SEND, number=number, num_bytes=blob.numel())
                broadcast(wire, blob, self._limits.total_s)
                num_members = len(self._audience.members)
        except BROKEN as broken:
            error = one_sentence(broken)
            self._give_up(number)
        return Sending(
            started_s=started_s,
            duration_s=time.monotonic() - begun,
            num_bytes=blob.numel(),
            num_members=num_members,
            error=error,
        )

    def close(self) -> None:
        """Leave the group."""
        leave(self._wire)
        self._wire = None

    def _group(self) -> Wire | None:
        """The group of all members, formed anew where it broke or others are there; None without members."""
        if self._wire is None or not self._audience.has_group:
            self.close()
            self._call_the_roll()
            if members := self._audience.members:
                name = f"group/{self.id}/{self._round}"
                for rank, member in enumerate(members, start=1):
                    self._mail(member, FORM, name=name, rank=rank, size=len(members) + 1)
                limit_s = self._limits.member_s
                self._wire = join_group(self._backend, self._meeting, name, 0, len(members) + 1, limit_s)
            self._audience.formed()
        return self._wire

    def _call_the_roll(self) -> None:
        """Drop the members who do not answer in time."""
        self._round += 1
        keys = {each: f"here/{self.id}/{self._round}/{each}" for each in self._audience.members}
        if not keys:
            return
        self._post(CALL, key=f"here/{self.id}/{self._round}")
        with suppress(dist.DistStoreError):  # that one does not answer in time is seen below
            self._store.wait(list(keys.values()), timedelta(seconds=self._limits.member_s))
        self._drop([member for member, key in keys.items() if not self._store.check([key])])
        for key in keys.values():
            self._store.delete_key(key)

    def _drop(self, members: Sequence[int]) -> None:
        for member in members:
            del self._processes[member]
            self._mail(member, DROPPED)
            log.warning("Member %d of the broadcasts of sender %d is gone or does not answer.", member, self.id)
        self._audience.drop(members)

    def _give_up(self, number: int) -> None:
        self._audience.broke()
        self.close()
        with suppress(*BROKEN):  # the meeting point itself may be what is gone
            self._post(MISS, number=number)

    def _post(self, kind: str, **words: Any) -> None:
        for member in self._audience.members:
            self._mail(member, kind, **words)

    def _mail(self, member: int, kind: str, **words: Any) -> None:
        _mail(self._store, self.id, member, kind, **words)


class Member:
    """Receives what one sender sends, on a thread of its own, and keeps it until it is asked for."""

    def __init__(self, meeting: Meeting, backend: str, sender: int, limits: Limits) -> None:
        """Join the audience of sender number `sender`. Raises WeightsError when the meeting point is not reached."""
        self._meeting, self._backend, self._sender, self._limits = meeting, backend, sender, limits
        self._store = meeting.connect()
        self._store.set_timeout(timedelta(seconds=IDLE_S))
        self._inbox: Inbox[torch.Tensor] = Inbox()
        self._memory = WarmMemory()
        self._wire: Wire | None = None
        self._number = self._join()
        self._thread = threading.Thread(target=self._listen, name=f"broadcasts-of-{sender}", daemon=True)
        self._thread.start()

    def take(self, number: int, audience: Sequence[int]) -> torch.Tensor | None:
        """What was sent under a number, once it is here whole; None when this member will not get it.

        Args:
            number: of a blob.
            audience: whom it is sent to.
        """
        if self._number not in audience or not self._thread.is_alive():
            return None
        # The sender may first wait for somebody else, twice: for an answer, and for the group to form.
        return self._inbox.take(number, stall_s=1.5 * self._limits.member_s, total_s=self._limits.total_s)

    def close(self) -> None:
        """Stop listening."""
        if not self._thread.is_alive():
            return
        with suppress(*BROKEN):
            _mail(self._meeting.connect(), self._sender, self._number, END)
            self._thread.join(self._limits.member_s)

    def _join(self) -> int:
        number = self._store.add(f"joined/{self._sender}", 1)
        self._store.set(f"member/{self._sender}/{number}", json.dumps(dataclasses.asdict(Process.current())))
        return number

    def _listen(self) -> None:
        try:
            while self._next_mail() != END:
                pass
        except BROKEN as error:
            log.info("No more broadcasts of sender %d: %s", self._sender, one_sentence(error))
        finally:
            self._inbox.abandon()
            leave(self._wire)

    def _next_mail(self) -> str:
        """Wait for mail, do what it says, and return its kind; "" when none came for long."""
        try:
            mail = json.loads(self._store.queue_pop(f"mail/{self._sender}/{self._number}"))
        except dist.DistStoreError:
            return ""
        self._inbox.progress()
        kind = mail.pop("kind")
        handlers = {
            CALL: self._answer,
            FORM: self._form,
            SEND: self._receive,
            MISS: self._inbox.miss,
            DROPPED: self._join_again,
        }
        if kind in handlers:
            handlers[kind](**mail)
        return kind

    def _answer(self, key: str) -> None:
        self._store.set(f"{key}/{self._number}", "")

    def _form(self, name: str, rank: int, size: int) -> None:
        self._break()
        try:
            self._wire = join_group(self._backend, self._meeting, name, rank, size, self._limits.member_s)
        except BROKEN as error:
            log.warning("No group formed with sender %d: %s", self._sender, one_sentence(error))

    def _receive(self, number: int, num_bytes: int) -> None:
        if self._wire is None:
            self._inbox.miss(number)
            return
        self._inbox.begin()
        blob = self._memory.take(num_bytes)
        try:
            broadcast(self._wire, blob, self._limits.total_s, self._inbox.progress)
        except BROKEN as error:
            log.warning("A broadcast of sender %d broke off: %s", self._sender, one_sentence(error))
            self._inbox.miss(number)
            self._break()
        else:
            self._inbox.put(number, blob)

    def _join_again(self) -> None:
        self._break()
        self._number = self._join()
        self._inbox.abandon()

    def _break(self) -> None:
        leave(self._wire)
        self._wire = None


def dismiss(meeting: Meeting) -> None:
    """Have all members stop listening, before the meeting point ends."""
    with suppress(*BROKEN):
        store = meeting.connect()
        for sender in range(1, store.add(SENDERS, 0) + 1):
            for member in range(1, store.add(f"joined/{sender}", 0) + 1):
                _mail(store, sender, member, END)


def _mail(store: dist.TCPStore, sender: int, member: int, kind: str, **words: Any) -> None:
    store.queue_push(f"mail/{sender}/{member}", json.dumps({"kind": kind} | words))


def _process(text: bytes) -> Process:
    return Process(**json.loads(text))
