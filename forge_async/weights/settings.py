"""Settings of the weight plane."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting

TRANSPORTS = ("auto", "rpc", "shm", "rdma", "ipc", "broadcast", "filesystem", "http")

BACKENDS = ("gloo", "nccl")

RDMA_BACKENDS = ("ibverbs", "tcp")

DELTA = ("auto", "never", "always")

VERIFY = ("none", "sampled", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSettings:
    """Keys under `weights`."""

    transport: str = setting(
        "auto", "how shards travel; auto: the fastest that this placement allows", choices=TRANSPORTS
    )
    keep_versions: int = setting(2, "newest versions that stay readable; older ones are deleted once unread", low=1)
    timeout_s: float = setting(120.0, "longest time one publication or pull may take", unit="s", low=0.1)
    store_restarts: int = setting(
        2,
        "how often in a run a store that dies is replaced by a new one, to which the learner publishes again; 0: its "
        "death ends the run",
        low=0,
    )
    folder: str = setting("", "filesystem: a folder that all hosts share; empty: in the run's directory")
    http_host: str = setting("127.0.0.1", "http: address that the store listens on, by which the other hosts reach it")
    broadcast_host: str = setting(
        "127.0.0.1",
        "broadcast: address of the store's host on which senders and readers meet, by which the other hosts reach it",
    )
    broadcast_backend: str = setting(
        "gloo", "broadcast: what carries the bytes; nccl: between GPUs, one in each process", choices=BACKENDS
    )
    broadcast_timeout_s: float = setting(
        5.0,
        "broadcast: longest wait for one reader to answer or to take a bucket; then the others go on without it, and "
        "it pulls",
        unit="s",
        low=0.1,
    )
    rdma_backend: str = setting(
        "ibverbs",
        "rdma: what carries the bytes; ibverbs: RDMA hardware, which every host must have; tcp: sockets, to try it "
        "without",
        choices=RDMA_BACKENDS,
    )
    ipc_device: int = setting(
        0, "ipc: number of the GPU, of those of the host, whose memory holds the versions; every process sees it", low=0
    )
    verify: str = setting(
        "sampled",
        "checksums of shards, made and compared beside generation (none: not at all), and how much of what a replica "
        "serves is compared in the pause of a pull: a sample that changes with each version, or all of it",
        choices=VERIFY,
    )
    probe_limit: float = setting(
        1.0,
        "policy.quantize: largest mean difference between what a replica and the learner say of a fixed text that a "
        "replica may serve with; unless verify=none",
        unit="nats a token",
        low=0.0,
    )
    merge_adapters: bool = setting(
        False,
        "with learner.lora.rank: publish and save the model with its adapters added in, whole each time, and not the "
        "adapters alone",
    )
    delta: str = setting(
        "auto",
        "whether a version is published as what changed since the one before, where that takes less than half of its "
        "bytes; auto: not where weights stay in one host's shared memory",
        choices=DELTA,
    )
    anchor_every: int = setting(
        20, "one in so many versions is published whole, for readers that come late or missed versions", low=1
    )

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs of the store's host whose memory holds versions: whoever publishes or reads must see them."""
        return (self.ipc_device,) if self.transport == "ipc" else ()

    @property
    def restarts(self) -> int:
        """How often a store may be replaced: never one whose memory a GPU's driver may take away at its death."""
        return 0 if self.transport == "ipc" else self.store_restarts

    @property
    def why_no_restart(self) -> str:
        """Why a store is not replaced though `store_restarts` allows it; "" where it is."""
        if self.restarts == self.store_restarts:
            return ""
        return (
            "With weights.transport=ipc no other takes its place: its memory, which the learner writes to, has ended."
        )

    def makes_deltas(self, *, is_shared: bool) -> bool:
        """Whether a writer publishes deltas.

        Args:
            is_shared: whether its transport is the store's own memory. There a whole version costs one copy, which the
                snapshot needs in any case, and a delta costs more than that at both ends.
        """
        wanted = self.delta == "always" or (self.delta == "auto" and not is_shared)
        return wanted and self.anchor_every > 1
