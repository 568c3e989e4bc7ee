"""Where the run's processes are started."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Keys under `job`."""

    kind: str = setting(
        "local",
        "local: this machine as one Monarch host; process: as one for each mesh; slurm, kubernetes: a cluster",
        choices=("local", "process", "slurm", "kubernetes"),
    )
    name: str = setting("forge-async", "name of the job on the cluster")
    learner_hosts: int = setting(1, "hosts of the learner mesh", low=1)
    policy_hosts: int = setting(1, "hosts of the policy mesh", low=1)
    reference_hosts: int = setting(
        0,
        "hosts of a mesh for reference.placement=service; 0: it runs on the first of the learner's hosts",
        low=0,
    )
    gpus_per_host: int = setting(0, "GPUs on each host; 0: CPU only", low=0)
    partition: str = setting("", "Slurm partition; empty: the cluster's default")
    time_limit: str = setting("", "Slurm time limit, HH:MM:SS; empty: the partition's")
    slurm_args: list[str] = setting([], "further sbatch arguments, such as --account=mine")
    namespace: str = setting("default", "Kubernetes namespace")
    image: str = setting("", "container image for Kubernetes")
