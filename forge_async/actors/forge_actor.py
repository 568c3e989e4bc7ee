"""The public actor: `await MyActor.options(procs=2).as_actor(...)`, or `.as_service(...)` for replicas of it."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from forge_async.actors.procs import Hosts, Procs, beat_of, faults, member  # first: it prepares Monarch's environment

# isort: split
from monarch._src.actor.endpoint import EndpointProperty
from monarch.actor import Actor, ActorError, HostMesh, concurrent_endpoint, endpoint, this_host
from monarch.spmd import setup_torch_elastic_env_async

from forge_async.actors.liveness import Process, Watch, shared_watch
from forge_async.actors.remote import RemoteError, from_actor_error, guarded, value_of
from forge_async.core.clock import within
from forge_async.core.errors import ConfigError, one_sentence

if TYPE_CHECKING:
    from forge_async.actors.service import Service

__all__ = ["ActorHandle", "ForgeActor", "Hosts", "Options", "RemoteError", "concurrent_endpoint", "endpoint", "faults"]

T = TypeVar("T")
log = logging.getLogger(__name__)
HOOKS = ("setup", "teardown")
"""Methods that are endpoints without being marked so."""
_numbers = itertools.count()


class ForgeActor(Actor):
    """An actor that can be spawned as one, or as a service of replicas.

    Mark methods with `@endpoint` (one call at a time) or `@concurrent_endpoint` (async, many at once). An `async def
    setup(self)` is called once in each process after the constructor: heavy imports belong there, so that the process
    that spawns stays light, and the garbage collector leaves alone what is there when it has ended. An `async def
    teardown(self)` is called before the process is ended on purpose. What an endpoint raises is an error for its caller
    and never the end of the actor. Endpoints cannot be called on `self`; share a plain method. A plain `def` endpoint
    runs on the actor's own worker thread.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            if name in HOOKS and inspect.isfunction(value):
                value = endpoint(value)
            if isinstance(value, EndpointProperty):
                setattr(cls, name, guarded(value))

    @classmethod
    def options(cls, **options: Any) -> Options:
        """How to spawn it: keywords of `Options`, such as procs, hosts, num_replicas, with_gpus, mesh_name."""
        return Options(cls=cls, **options)

    @classmethod
    async def as_actor(cls, *args: Any, **kwargs: Any) -> ActorHandle:
        """Spawn one in a process of its own on this host, with the constructor arguments given."""
        return await cls.options().as_actor(*args, **kwargs)

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> Service:
        """Spawn a service of one replica on this host, with the constructor arguments given."""
        return await cls.options().as_service(*args, **kwargs)

    async def setup(self) -> None:
        """Prepare in the child; replaced by subclasses."""

    async def teardown(self) -> None:
        """Release what the actor holds before its process is ended; replaced by subclasses."""

    @concurrent_endpoint
    async def alive(self) -> Process:
        """Who and where the actor's process is. Answers while its loop is free; the pulse beside it always does."""
        return Process.current()

    async def __supervise__(self, failure: Any) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """An actor spawned by this one failed: recorded, not passed up. Its handle notices deaths itself."""
        faults.append(" ".join(str(failure).split()))
        return True


for _hook in HOOKS:  # endpoints too, but to a type checker plain methods, so that subclasses write plain methods
    setattr(ForgeActor, _hook, endpoint(vars(ForgeActor)[_hook]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How an actor is spawned."""

    cls: type[ForgeActor]
    procs: int = 1
    """Processes on each host; a mesh of several is one actor with ranks."""
    hosts: Hosts | HostMesh | None = None
    """Where: hosts of a `Placement`, a Monarch host mesh, or None for this host. A service gives each replica one."""
    num_replicas: int = 1
    """Replicas of a service."""
    with_gpus: bool = False
    """Whether each process gets a GPU of its own (CUDA_VISIBLE_DEVICES); without, it sees none."""
    gpus_each: int = 1
    """With GPUs, how many each process gets."""
    gpus: tuple[int, ...] = ()
    """These GPUs of the host, one for each process, in place of free ones: its own, that an actor hands on."""
    shared_gpus: tuple[int, ...] = ()
    """GPUs of the host that each process sees after its own, whoever else has them."""
    mesh_name: str | None = None
    """What errors, logs and processes call it; None: the class's name in lower case."""
    spmd: bool = False
    """Whether the processes form one torch.distributed world: sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR ..."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of its processes, set before their interpreters start."""
    start_timeout_s: float = 300.0
    """How long start and `setup` may take."""
    stop_timeout_s: float = 10.0
    """How long ending it may take before its processes are killed."""
    max_restarts: int = 5
    """How often a service replaces each replica that dies."""

    def __post_init__(self) -> None:
        for name in ("procs", "num_replicas"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{self.cls.__name__}.options: {name}={value} is below 1; give 1 or more.")
        if self.hosts is not None and not isinstance(self.hosts, (Hosts, HostMesh)):
            raise ConfigError(
                f"{self.cls.__name__}.options: hosts={self.hosts!r} is not a host mesh; give one of a Placement's, "
                "a Monarch HostMesh, or None for this host."
            )

    @property
    def name(self) -> str:
        """What the actor is called."""
        return self.mesh_name or self.cls.__name__.lower()

    def where(self) -> Hosts:
        """The hosts, whatever they were given as."""
        if isinstance(self.hosts, Hosts):
            return self.hosts
        return Hosts(mesh=this_host() if self.hosts is None else self.hosts)

    async def as_actor(self, *args: Any, **kwargs: Any) -> ActorHandle:
        """Spawn the actor with these constructor arguments and wait for its `setup`."""
        if self.num_replicas != 1:
            raise ConfigError(f"{self.name}: num_replicas={self.num_replicas} needs as_service; as_actor spawns one.")
        return await spawn(self, args, kwargs)

    async def as_service(self, *args: Any, **kwargs: Any) -> Service:
        """Spawn `num_replicas` of it with these constructor arguments, and wait for them all."""
        from forge_async.actors.service import Service

        return await Service.start(self, args, kwargs)

    def replace(self, **changes: Any) -> Options:
        """The same options with some changed."""
        return dataclasses.replace(self, **changes)


async def spawn(options: Options, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ActorHandle:
    """Start the processes, the actor in them, and its `setup`; ends the processes again if any of it fails."""
    procs = await Procs.start(
        options.name,
        options.where(),
        procs=options.procs,
        gpus_each=options.gpus_each if options.with_gpus else 0,
        gpus=options.gpus,
        shared_gpus=options.shared_gpus,
        env=options.env,
        timeout_s=options.start_timeout_s,
    )
    try:
        if options.spmd:
            await _form_world(options, procs)
        mesh = procs.mesh.spawn(f"{procs.safe_name}_{next(_numbers)}", options.cls, *args, **kwargs)
        handle = ActorHandle(options.name, options.cls, mesh, procs.pulse, procs.processes)
        handle._own(procs, options.stop_timeout_s)
        await BoundEndpoint(handle, "setup").call(timeout_s=options.start_timeout_s)
        await procs.settle(options.start_timeout_s)
    except BaseException:
        await asyncio.shield(procs.stop(options.stop_timeout_s))
        raise
    return handle


async def _form_world(options: Options, procs: Procs) -> None:
    await within(
        setup_torch_elastic_env_async(procs.mesh),
        options.start_timeout_s,
        who=options.name,
        waits_for="the addresses of its torch.distributed world",
        from_whom="its own processes",
    )


class ActorHandle:
    """An actor, from outside: its endpoints are attributes, each with `call_one`, `call` and `broadcast`.

    A handle can be sent to other actors and watches the actor's processes there too; only the process that spawned
    the actor can shut it down.
    """

    def __init__(self, name: str, cls: type[ForgeActor], mesh: Any, pulse: Any, processes: tuple[Process, ...]) -> None:
        self.name = name
        self.cls = cls
        self.mesh = mesh
        """The Monarch actor mesh, for what needs it raw."""
        self.processes = processes
        self._pulse = pulse
        self._procs: Procs | None = None
        self._ranks: dict[int, ActorHandle] = {}
        self._stop_timeout_s = 10.0
        self._ending: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorHandle, (self.name, self.cls, self.mesh, self._pulse, self.processes)

    def __repr__(self) -> str:
        where = ", ".join(f"{process.pid} on {process.host}" for process in self.processes)
        return f"<actor {self.name}: pid {where}>"

    def __getattr__(self, name: str) -> BoundEndpoint:
        cls = self.__dict__.get("cls")
        if cls is None or not isinstance(getattr(cls, name, None), EndpointProperty):
            raise AttributeError(f"{cls.__name__ if cls else 'The actor'} has no endpoint {name!r}.")
        return BoundEndpoint(self, name)

    @property
    def watch(self) -> Watch:
        """Notices the actor's death."""
        if self._procs is not None and self._procs.watch is not None:
            return self._procs.watch
        return shared_watch(self.name, self.processes, beat_of(self._pulse))

    @property
    def pids(self) -> list[int]:
        """Pids of its processes, by rank."""
        return [process.pid for process in self.processes]

    def rank(self, rank: int) -> ActorHandle:
        """The actor of one rank of the mesh. Its calls fail only if that rank's own process dies."""
        if rank not in self._ranks:
            one = member(self.mesh, rank)
            self._ranks[rank] = ActorHandle(f"{self.name}[{rank}]", self.cls, one, self._pulse, (self.processes[rank],))
        return self._ranks[rank]

    async def guard(self, awaitable: Awaitable[T]) -> T:
        """Await something that depends on the actor, but raise ActorDiedError as soon as it is dead."""
        return await self.watch.guard(awaitable)

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """Call `teardown`, end the processes, kill what is left after `timeout_s` seconds. May be called again."""
        if self._procs is None:
            raise RuntimeError(f"{self.name} was not spawned by this handle; shut it down where it was spawned.")
        if self._ending is None:
            timeout_s = self._stop_timeout_s if timeout_s is None else timeout_s
            self._ending = asyncio.ensure_future(self._end(self._procs, timeout_s))
        await asyncio.shield(self._ending)

    async def _end(self, procs: Procs, timeout_s: float) -> None:
        if self.watch.died is None:
            try:
                await BoundEndpoint(self, "teardown").call(timeout_s=timeout_s / 2)
            except Exception as error:  # noqa: BLE001  a failed teardown must not keep the processes
                log.warning("%s: teardown failed: %s", self.name, one_sentence(error))
        await procs.stop(timeout_s / 2)

    def _own(self, procs: Procs, stop_timeout_s: float) -> None:
        self._procs, self._stop_timeout_s = procs, stop_timeout_s


@dataclass(frozen=True, slots=True)
class BoundEndpoint:
    """One endpoint of one actor."""

    handle: ActorHandle
    name: str

    async def call_one(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call it on an actor of one process and return its value.

        Raises what the endpoint raised; ActorDiedError when the process dies meanwhile; StallError after `timeout_s`
        seconds, when the call itself may still be running there (Monarch cancels nothing).
        """
        answer = await self._answer(self._adverb.call_one(*args, **kwargs), timeout_s)
        return value_of(answer, self._where)

    async def call(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call it on every process; values in rank order. Raises like `call_one`, when all have answered."""
        answers = await self._answer(self._adverb.call(*args, **kwargs), timeout_s)
        return [value_of(answer, self._where) for _, answer in answers]

    async def call_ranks(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """As `call`, for ranks that wait for each other: what one of them raises is raised at once.

        The others may be left in a collective operation that never ends. Each rank is asked by itself, so Monarch's
        `current_rank()` says 0 to all of them; calls come to each in the same order.
        """
        if len(self.handle.processes) == 1:
            return [await self.call_one(*args, timeout_s=timeout_s, **kwargs)]
        ranks = [self.handle.rank(rank) for rank in range(len(self.handle.processes))]
        calls = [asyncio.ensure_future(BoundEndpoint(each, self.name)._value(args, kwargs)) for each in ranks]
        try:
            return await self._answer(asyncio.gather(*calls), timeout_s)
        finally:
            for call in calls:
                call.cancel()

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Send it to every process and do not wait; what it returns or raises is lost."""
        self._adverb.broadcast(*args, **kwargs)

    async def _value(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of a rank, whose death is noticed by whoever watches the whole actor."""
        return value_of(await self._adverb.call_one(*args, **kwargs), self._where)

    @property
    def _adverb(self) -> Any:
        return getattr(self.handle.mesh, self.name)

    @property
    def _where(self) -> str:
        return f"{self.handle.name}.{self.name}"

    async def _answer(self, call: Any, timeout_s: float | None) -> Any:
        guarded_call = self.handle.guard(call)
        try:
            if timeout_s is None:
                return await guarded_call
            return await within(
                guarded_call,
                timeout_s,
                who=f"A call of {self._where}",
                waits_for="the answer",
                from_whom=f"pid {', '.join(map(str, self.handle.pids))}",
            )
        except ActorError as error:
            raise from_actor_error(error, self._where) from None
