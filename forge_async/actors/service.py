"""A service: replicas of one actor behind one name, with routing, health, deadlines and respawn."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge_async.actors.forge_actor import ActorHandle, Options, spawn  # first: it prepares Monarch's environment
from forge_async.actors.procs import Hosts, before_stop_all

# isort: split
from monarch._src.actor.endpoint import EndpointProperty

from forge_async.core.errors import ActorDiedError, StallError, one_sentence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaHealth:
    """How one replica is."""

    index: int
    healthy: bool
    pids: tuple[int, ...]
    """Its processes; empty while it has none."""
    outstanding: int
    """Calls and sessions it has now."""
    restarts: int
    """How often it was replaced."""
    last_error: str
    """How it died last; empty if it never did."""


class Replica:
    """One replica: the actor that serves now, and its successors when it dies."""

    def __init__(self, index: int, handle: ActorHandle) -> None:
        self.index = index
        self.handle: ActorHandle | None = handle
        """None from the death of one incarnation to the readiness of the next."""
        self.outstanding = 0
        self.restarts = 0
        self.last_error = ""
        self.gone = False
        """Whether it died once too often, or its respawn failed."""

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count one more call or session."""
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1

    def health(self) -> ReplicaHealth:
        """How it is."""
        return ReplicaHealth(
            index=self.index,
            healthy=self.handle is not None,
            pids=tuple(self.handle.pids) if self.handle else (),
            outstanding=self.outstanding,
            restarts=self.restarts,
            last_error=self.last_error,
        )


class Service:
    """Replicas of one actor. `service.endpoint.route(...)` calls one healthy replica, `.fanout(...)` all of them.

    It lives in the process that started it. Other actors are given handles of replicas (`service.handles()`).
    """

    def __init__(self, options: Options, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.name = options.name
        self.options = options
        self.replicas: list[Replica] = []
        self.on_death: list[Callable[[int, ActorDiedError], None]] = []
        """Called with the index of a replica that died and how, before it is respawned."""
        self._args, self._kwargs = args, kwargs
        self._turn = 0
        self._tenders: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._session: contextvars.ContextVar[Session | None] = contextvars.ContextVar(self.name, default=None)

    @classmethod
    async def start(cls, options: Options, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Service:
        """Spawn the replicas, together; if one fails, ends the others and raises."""
        service = cls(options, args, kwargs)
        spawning = [asyncio.ensure_future(service._spawn(index)) for index in range(options.num_replicas)]
        try:
            handles = await asyncio.gather(*spawning)
        except BaseException:
            for task in spawning:
                task.cancel()
            for result in await asyncio.gather(*spawning, return_exceptions=True):
                if isinstance(result, ActorHandle):
                    await result.shutdown()
            raise
        service.replicas = [Replica(index, handle) for index, handle in enumerate(handles)]
        service._tenders = [asyncio.ensure_future(service._tend(replica)) for replica in service.replicas]
        before_stop_all.append(service._let_go)
        return service

    def __getattr__(self, name: str) -> ServiceEndpoint:
        options = self.__dict__.get("options")
        if options is None or not isinstance(getattr(options.cls, name, None), EndpointProperty):
            raise AttributeError(f"{options.cls.__name__ if options else 'The service'} has no endpoint {name!r}.")
        return ServiceEndpoint(self, name)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"The service {self.name} lives in the process that started it and cannot be sent to another; send "
            "service.handles(), or a handle of an actor that calls it."
        )

    def session(self) -> Session:
        """`async with service.session():` all routed calls inside go to the same replica."""
        return Session(self)

    def health(self) -> list[ReplicaHealth]:
        """How each replica is, by index."""
        return [replica.health() for replica in self.replicas]

    def handles(self) -> list[ActorHandle | None]:
        """The actor of each replica, by index; None for one that is being respawned or gone."""
        return [replica.handle for replica in self.replicas]

    def renew(self, **kwargs: Any) -> None:
        """Constructor arguments for replicas that are respawned from now on, in place of those of these names.

        One whose respawn is under way is ended when it is there, and respawned once more.
        """
        self._kwargs = {**self._kwargs, **kwargs}

    def give_up(self, index: int, reason: str) -> None:
        """Count a replica as dead, because it hangs for instance: its calls fail, it is killed and respawned."""
        if (handle := self.replicas[index].handle) is not None:
            handle.watch.declare(f"{handle.name} (pid {handle.pids[0]}) was given up: {reason}.")

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """End all replicas, together. Calls under way fail with ActorDiedError. May be called again."""
        tenders = self._tenders
        ending = self._let_go()
        await asyncio.gather(*tenders, return_exceptions=True)
        await asyncio.gather(*(handle.shutdown(timeout_s) for handle in ending))

    def _let_go(self) -> list[ActorHandle]:
        """Respawn and serve no more; returns the actors that are still to be ended."""
        with contextlib.suppress(ValueError):
            before_stop_all.remove(self._let_go)
        for tender in self._tenders:
            tender.cancel()
        self._tenders = []
        ending = [replica.handle for replica in self.replicas if replica.handle]
        for replica in self.replicas:
            replica.handle, replica.gone, replica.last_error = None, True, f"{self.name} was shut down."
        self._announce()
        return ending

    async def _spawn(self, index: int) -> ActorHandle:
        many = self.options.num_replicas > 1
        hosts: Hosts = self.options.where().one(index)
        options = dataclasses.replace(
            self.options, hosts=hosts, num_replicas=1, mesh_name=f"{self.name}[{index}]" if many else self.name
        )
        return await spawn(options, self._args, self._kwargs)

    async def _tend(self, replica: Replica) -> None:
        """Wait for the replica's death, replace it, and so on."""
        while replica.handle is not None:
            handle = replica.handle
            error = await handle.watch.wait_for_death()
            replica.handle, replica.last_error = None, str(error)
            replica.gone = replica.restarts >= self.options.max_restarts
            self._announce()
            log.warning("%s%s", error, " It will not be respawned." if replica.gone else " It is being respawned.")
            self._notify(replica.index, error)
            await handle.shutdown(timeout_s=2.0)
            while replica.handle is None and not replica.gone:
                await self._respawn(replica)

    def _notify(self, index: int, error: ActorDiedError) -> None:
        for notify in self.on_death:
            try:
                notify(index, error)
            except Exception:
                log.exception("A callback in on_death of %s raised; the replica is respawned all the same.", self.name)

    async def _respawn(self, replica: Replica) -> None:
        replica.restarts += 1
        kwargs = self._kwargs
        try:
            handle = await self._spawn(replica.index)
            if kwargs is self._kwargs:
                replica.handle = handle
            else:
                replica.restarts -= 1
                await handle.shutdown(timeout_s=2.0)
        except Exception as error:  # noqa: BLE001  whatever a constructor or setup raises
            replica.last_error = one_sentence(error)
            replica.gone = replica.restarts >= self.options.max_restarts
            log.warning("%s[%d] could not be respawned: %s", self.name, replica.index, replica.last_error)
        self._announce()

    def _announce(self) -> None:
        """Wake those who wait for a healthy replica."""
        self._changed.set()
        self._changed = asyncio.Event()

    def pick(self) -> Replica | None:
        """The healthy replica with the fewest calls, ties in turn; None when there is none now."""
        healthy = [replica for replica in self.replicas if replica.handle is not None]
        if not healthy:
            return None
        self._turn += 1
        count = len(self.replicas)
        return min(healthy, key=lambda replica: (replica.outstanding, (replica.index - self._turn) % count))

    async def wait_for_replica(self, timeout_s: float | None = None) -> Replica:
        """`pick`, but waits for a respawn under way. Raises ActorDiedError when no replica will come back."""
        deadline = asyncio.get_running_loop().time() + (
            self.options.start_timeout_s if timeout_s is None else timeout_s
        )
        while (replica := self.pick()) is None:
            if all(replica.gone for replica in self.replicas):
                last = next((replica.last_error for replica in self.replicas if replica.last_error), "")
                raise ActorDiedError(f"No replica of {self.name} is left. {last}".strip())
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError as error:
                raise StallError(
                    f"A call of {self.name} waited for a healthy replica, and the {len(self.replicas)} being respawned "
                    f"took too long; the last died so: {self.replicas[0].last_error}"
                ) from error
        return replica


class Session:
    """Calls that stay with one replica. If it dies they raise ActorDiedError; a new session goes to another."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._replica: Replica | None = None
        self._handle: ActorHandle | None = None
        self._exit = contextlib.ExitStack()

    async def __aenter__(self) -> Session:
        self._replica = await self._service.wait_for_replica()
        self._handle = self._replica.handle
        self._exit.enter_context(self._replica.busy())
        token = self._service._session.set(self)
        self._exit.callback(self._service._session.reset, token)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._exit.close()

    @property
    def replica_index(self) -> int:
        """Which replica it holds."""
        return self.held()[0].index

    def held(self) -> tuple[Replica, ActorHandle]:
        """The replica and the actor it was opened on, if that still lives."""
        replica, handle = self._replica, self._handle
        if replica is None or handle is None:
            raise RuntimeError("A session begins with `async with service.session():`.")
        if replica.handle is not handle:
            raise ActorDiedError(
                f"The session's replica {replica.index} of {self._service.name} is gone: {replica.last_error} "
                "Open a new session; it goes to another replica."
            )
        return replica, handle

    def __getattr__(self, name: str) -> ServiceEndpoint:
        return getattr(self._service, name)


@dataclass(frozen=True, slots=True)
class ServiceEndpoint:
    """One endpoint of a service. Calls raise what the endpoint raised, ActorDiedError, and StallError on `timeout_s`.

    Where a replica is a mesh of several processes, a value is the list of theirs, in rank order.
    """

    service: Service
    name: str

    async def route(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call the least loaded healthy replica, or the session's; waits for a respawn if none is healthy now."""
        session = self.service._session.get()
        if session is not None:
            return await self._call(*session.held(), args, kwargs, timeout_s)
        replica = await self.service.wait_for_replica(timeout_s)
        return await self._call(replica, replica.handle, args, kwargs, timeout_s)

    async def to(self, index: int, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call the replica of this index; ActorDiedError if it is not healthy now."""
        replica = self.service.replicas[index]
        if replica.handle is None:
            raise ActorDiedError(f"Replica {index} of {self.service.name} is not there: {replica.last_error}")
        return await self._call(replica, replica.handle, args, kwargs, timeout_s)

    async def fanout(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call all healthy replicas; values by index. Waits for all, then raises the first error if there is one."""
        targets = [replica for replica in self.service.replicas if replica.handle is not None]
        if not targets:
            targets = [await self.service.wait_for_replica(timeout_s)]
        calls = (self._call(replica, replica.handle, args, kwargs, timeout_s) for replica in targets)
        values = await asyncio.gather(*calls, return_exceptions=True)
        for value in values:
            if isinstance(value, BaseException):
                raise value
        return list(values)

    async def _call(
        self,
        replica: Replica,
        handle: ActorHandle | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
    ) -> Any:
        bound = getattr(handle, self.name)
        adverb = bound.call_one if self.service.options.procs == 1 else bound.call
        with replica.busy():
            return await adverb(*args, timeout_s=timeout_s, **kwargs)
