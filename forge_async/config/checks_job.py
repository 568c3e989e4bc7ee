"""Checks of where a run is to run: hosts, GPUs, and what a scheduler wants to know."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from forge_async.config.schema import Config

RDMA_DEVICES = Path("/sys/class/infiniband")
"""Where Linux lists RDMA hardware, of every maker."""


def hosts_exist(config: Config) -> str | None:
    """Only a cluster has more hosts than this machine."""
    job = config.job
    for key, count in (("learner_hosts", job.learner_hosts), ("policy_hosts", job.policy_hosts)):
        if count > 1 and job.kind in ("local", "process"):
            return f"job.{key}={count} needs job.kind=slurm or kubernetes, but job.kind={job.kind}; use job.{key}=1."
    most = {"local": 0, "process": 1}.get(job.kind, job.reference_hosts)
    if job.reference_hosts > most:
        return (
            f"job.reference_hosts={job.reference_hosts} needs job.kind=slurm or kubernetes, but job.kind={job.kind}; "
            f"use job.reference_hosts={most}."
        )
    return None


def reference_hosts_are_used(config: Config) -> str | None:
    """Hosts are asked for only when something runs on them."""
    hosts = config.job.reference_hosts
    if hosts and not config.reference.is_service:
        return (
            f"job.reference_hosts={hosts} would have nothing to run, since reference.placement="
            f"{config.reference.placement}; use reference.placement=service, or job.reference_hosts=0."
        )
    return None


def hosts_share_equally(config: Config) -> str | None:
    """Each host of a mesh has the same number of processes."""
    for key, count, hosts_key, hosts in (
        ("learner.ranks", config.learner.ranks, "job.learner_hosts", config.job.learner_hosts),
        ("policy.replicas", config.policy.replicas, "job.policy_hosts", config.job.policy_hosts),
        ("reference.ranks", config.reference.ranks, "job.reference_hosts", config.job.reference_hosts or 1),
    ):
        if count % hosts:
            fitting = -(-count // hosts) * hosts
            return f"{key}={count} cannot be shared equally by {hosts_key}={hosts}; use {key}={fitting}."
    return None


def gpus_suffice(config: Config) -> str | None:
    """Each rank of the learner, of an engine and of a reference service has a GPU of its own, when there are GPUs."""
    job, learner = config.job, config.learner.ranks
    policy = config.policy.replicas * config.policy.tensor_parallel
    reference = config.reference.ranks if config.reference.is_service else 0
    if job.gpus_per_host == 0:
        return None
    beside = f", reference.ranks={reference}" if reference else ""
    need = learner + policy + reference
    if job.kind in ("local", "process") and need > job.gpus_per_host:
        return (
            f"learner.ranks={learner}{beside} and {policy} engine ranks need {need} GPUs on this machine, but "
            f"job.gpus_per_host={job.gpus_per_host}; use fewer learner.ranks or policy.replicas, or more GPUs."
        )
    if reference and not job.reference_hosts and -(-learner // job.learner_hosts) + reference > job.gpus_per_host:
        return (
            f"reference.ranks={reference} need GPUs beside those of learner.ranks={learner} on the first of "
            f"job.learner_hosts={job.learner_hosts} with job.gpus_per_host={job.gpus_per_host}; use "
            "job.reference_hosts=1 or more, or reference.placement=learner."
        )
    for key, need, hosts_key, hosts in (
        ("learner.ranks", learner, "job.learner_hosts", job.learner_hosts),
        ("policy.replicas * policy.tensor_parallel", policy, "job.policy_hosts", job.policy_hosts),
        ("reference.ranks", reference, "job.reference_hosts", job.reference_hosts or 1),
    ):
        if need > hosts * job.gpus_per_host:
            return (
                f"{key}={need} is more than the GPUs of {hosts_key}={hosts} with "
                f"job.gpus_per_host={job.gpus_per_host}; use {hosts_key}={-(-need // job.gpus_per_host)} or more."
            )
    return None


def nccl_has_gpus(config: Config) -> str | None:
    """NCCL moves bytes between GPUs only."""
    weights, job = config.weights, config.job
    if weights.transport == "broadcast" and weights.broadcast_backend == "nccl" and job.gpus_per_host == 0:
        return (
            "weights.broadcast_backend=nccl needs a GPU for each learner rank and each rank of an engine, but "
            "job.gpus_per_host=0; use weights.broadcast_backend=gloo."
        )
    return None


def ipc_has_one_host(config: Config) -> str | None:
    """A GPU's memory is shared by the processes of its own host only."""
    weights, job = config.weights, config.job
    if weights.transport != "ipc":
        return None
    if job.kind not in ("local", "process"):
        return f"weights.transport=ipc is for one host, and job.kind={job.kind} has more; use weights.transport=auto."
    if job.gpus_per_host == 0:
        return "weights.transport=ipc needs a GPU, but job.gpus_per_host=0; use weights.transport=shm."
    if weights.ipc_device >= job.gpus_per_host:
        return (
            f"weights.ipc_device={weights.ipc_device} is not below job.gpus_per_host={job.gpus_per_host}; "
            "GPUs are counted from 0."
        )
    return None


def rdma_has_hardware(config: Config) -> str | None:
    """RDMA needs hardware, which can be looked for where the whole run is on this machine."""
    weights, job = config.weights, config.job
    if weights.transport != "rdma" or weights.rdma_backend != "ibverbs" or job.kind not in ("local", "process"):
        return None
    if RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()):
        return None
    return (
        f"weights.rdma_backend=ibverbs needs RDMA hardware, and this machine lists none in {RDMA_DEVICES}; "
        "use weights.transport=shm, or weights.rdma_backend=tcp to try it without."
    )


def image_is_given(config: Config) -> str | None:
    """Kubernetes starts containers."""
    if config.job.kind == "kubernetes" and not config.job.image:
        return "job.kind=kubernetes needs a container image; give job.image=registry/name:tag (see the Containerfile)."
    return None


def time_limit_reads(config: Config) -> str | None:
    """Slurm's HH:MM:SS, with days before it if need be."""
    limit = config.job.time_limit
    if limit and not re.fullmatch(r"(\d+-)?\d{1,2}:\d{2}:\d{2}", limit):
        return f"job.time_limit={limit} is not a time; write HH:MM:SS, such as job.time_limit=04:00:00."
    return None


JOB_CHECKS: tuple[Callable[[Config], str | None], ...] = (
    hosts_exist,
    reference_hosts_are_used,
    hosts_share_equally,
    gpus_suffice,
    nccl_has_gpus,
    ipc_has_one_host,
    rdma_has_hardware,
    image_is_given,
    time_limit_reads,
)
"""In the order in which they are told."""
