"""Monarch's jobs for a cluster, built from the `job` settings; and their specification as text, for `--dry-run`.

Nothing here submits anything: Monarch does when `state()` of the built job is called. Clusters have not been run by
this project; the specification is compared with what Monarch's own classes produce (tests/unit/runtime).
"""

from __future__ import annotations

import logging
from typing import Any

import yaml

from forge_async.config.job import JobSettings
from forge_async.core.errors import ConfigError, MissingPackageError

REFERENCE = "reference"
SLURM_PORT = 22222
KUBERNETES_PORT = 26600
GPU_RESOURCE = "nvidia.com/gpu"


def roles(job: JobSettings) -> tuple[str, ...]:
    """The meshes of hosts of a job. Replay, rollout workers and store run beside the controller; a reference service
    that has no hosts of its own runs on the first of the learner's."""
    return ("learner", "policy", *([REFERENCE] if job.reference_hosts else []))


def build(job: JobSettings, *, log_dir: str) -> Any:
    """The Monarch job of `job.kind`, not submitted. Raises ConfigError for a kind that needs none or lacks a key.

    What the cluster prints goes to `log_dir`, which is made.

    Building a cluster's job makes Monarch talk TCP in this process from then on.
    """
    check(job)
    if job.kind == "process":
        from monarch.job import ProcessJob

        logging.getLogger("monarch._src.job.job").setLevel(logging.WARNING)
        return ProcessJob(dict.fromkeys(roles(job), 1))
    if job.kind == "slurm":
        from monarch.job import SlurmJob

        return SlurmJob(**slurm_arguments(job, log_dir))
    if job.kind == "kubernetes":
        return _build_kubernetes(job)
    raise ConfigError(f"job.kind={job.kind} starts no job: its processes run on this host.")


def _build_kubernetes(job: JobSettings) -> Any:
    try:
        from monarch.job.kubernetes import ImageSpec, KubernetesJob
    except (ImportError, RuntimeError) as error:
        raise MissingPackageError(
            "job.kind=kubernetes needs the kubernetes package: .venv/bin/pip install kubernetes"
        ) from error
    built = KubernetesJob(namespace=job.namespace)
    for role in roles(job):
        image = ImageSpec(job.image, resources=_resources(job))
        built.add_mesh(mesh_name(job, role), num_hosts(job, role), image_spec=image, port=KUBERNETES_PORT)
    return built


def mesh_name(job: JobSettings, role: str) -> str:
    """What Monarch calls the role's mesh of hosts. On Kubernetes it names a resource, so it carries the job's name."""
    if job.kind != "kubernetes":
        return role
    return "".join(char for char in job.name.lower() if char.isalnum()) + role


def num_hosts(job: JobSettings, role: str) -> int:
    """Hosts of the role's mesh."""
    return {"learner": job.learner_hosts, "policy": job.policy_hosts, REFERENCE: job.reference_hosts}[role]


def check(job: JobSettings) -> None:
    """Raise ConfigError for what is missing or cannot work."""
    if job.kind == "kubernetes" and not job.image:
        raise ConfigError("job.image is empty: job.kind=kubernetes needs the container image that its pods run.")
    if job.kind == "kubernetes":
        longest = max(roles(job), key=len)
        name = mesh_name(job, longest)
        if not name[0].isalpha() or not name.isascii() or len(name) > 63:
            raise ConfigError(
                f"job.name={job.name} makes no Kubernetes name ({name}): begin with a letter, use at most "
                f"{63 - len(longest)} letters and digits."
            )
    if job.kind in ("local", "process") and (job.learner_hosts, job.policy_hosts) != (1, 1):
        raise ConfigError(
            f"job.kind={job.kind} runs on this machine, so job.learner_hosts={job.learner_hosts} and "
            f"job.policy_hosts={job.policy_hosts} must be 1; job.kind=slurm or kubernetes has more."
        )
    if job.reference_hosts > {"local": 0, "process": 1}.get(job.kind, job.reference_hosts):
        raise ConfigError(
            f"job.kind={job.kind} has no job.reference_hosts={job.reference_hosts}; use "
            f"{'0' if job.kind == 'local' else '1 or 0'}, or job.kind=slurm or kubernetes."
        )


def check_fit(job: JobSettings, role: str, num_procs: int) -> int:
    """Processes of the role on each host. Raises ConfigError when they cannot be laid out evenly, a GPU each."""
    hosts = num_hosts(job, role)
    if num_procs % hosts:
        raise ConfigError(
            f"{num_procs} {role} processes do not spread evenly over job.{role}_hosts={hosts}; "
            f"give a multiple of {hosts}, or fewer hosts."
        )
    per_host = num_procs // hosts
    if job.gpus_per_host and per_host > job.gpus_per_host:
        raise ConfigError(
            f"{per_host} {role} processes a host need a GPU each, and job.gpus_per_host={job.gpus_per_host}; "
            f"raise job.{role}_hosts or lower the number of processes."
        )
    return per_host


def describe(job: JobSettings, *, learner_procs: int = 1, policy_procs: int = 1, reference_procs: int = 0) -> str:
    """The specification of the job as YAML text: what would be asked for, and what would run there.

    Args:
        learner_procs: learner ranks in all.
        policy_procs: policy replicas times their tensor-parallel size.
        reference_procs: ranks of the reference service; 0: there is none.
    """
    check(job)
    procs = {"learner": learner_procs, "policy": policy_procs, REFERENCE: reference_procs}
    layout: dict[str, dict[str, Any]] = {
        role: {"hosts": num_hosts(job, role), "processes_per_host": check_fit(job, role, procs[role])}
        for role in roles(job)
    }
    if reference_procs and not job.reference_hosts:
        layout[REFERENCE] = {"where": "the first of the learner's hosts", "processes": reference_procs}
    documents: list[dict[str, Any]] = [
        {"job": job.kind, "name": job.name, "placement": layout, "controller": "this host"}
    ]
    if job.kind == "slurm":
        documents.append({"SlurmJob": slurm_arguments(job, "logs"), "sbatch": sbatch_directives(job, "logs")})
    if job.kind == "kubernetes":
        documents += [manifest(job, role) for role in roles(job)]
    return yaml.safe_dump_all(documents, sort_keys=False, default_flow_style=False, width=120)


def slurm_arguments(job: JobSettings, log_dir: str) -> dict[str, Any]:
    """Arguments of Monarch's SlurmJob."""
    return {
        "meshes": {role: num_hosts(job, role) for role in roles(job)},
        "job_name": job.name,
        "partition": job.partition or None,
        "time_limit": job.time_limit or None,
        "gpus_per_node": job.gpus_per_host or None,
        "slurm_args": list(job.slurm_args),
        "monarch_port": SLURM_PORT,
        "log_dir": log_dir,
    }


def sbatch_directives(job: JobSettings, log_dir: str) -> list[str]:
    """What Monarch's SlurmJob asks sbatch for; it adds the controller's pid to the job's name."""
    name = f"{job.name}_<pid>"
    directives = [
        f"--job-name={name}",
        "--ntasks-per-node=1",
        f"--nodes={sum(num_hosts(job, role) for role in roles(job))}",
        f"--output={log_dir}/slurm_%j_{name}.out",
        f"--error={log_dir}/slurm_%j_{name}.err",
        f"--time={job.time_limit}" if job.time_limit else "",
        f"--gpus-per-node={job.gpus_per_host}" if job.gpus_per_host else "",
        "--exclusive",
        f"--partition={job.partition}" if job.partition else "",
        *(argument for argument in job.slurm_args if argument.startswith("-")),
    ]
    return [directive for directive in directives if directive]


def manifest(job: JobSettings, role: str) -> dict[str, Any]:
    """The MonarchMesh resource that Monarch's KubernetesJob creates for the role."""
    container: dict[str, Any] = {
        "name": "worker",
        "image": job.image,
        "command": ["python", "-u", "-c", "<Monarch's worker loop>"],
        "env": [
            {"name": "MONARCH_PORT", "value": str(KUBERNETES_PORT)},
            {
                "name": "MONARCH_SERVICE_PROC_RANK",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}},
            },
            {"name": "MONARCH_SERVICE_PROC_IDS", "value": "<drawn when submitted>"},
        ],
    }
    if (resources := _resources(job)) is not None:
        amounts = {name: str(amount) for name, amount in resources.items()}
        container["resources"] = {"requests": amounts, "limits": dict(amounts)}
    return {
        "apiVersion": "monarch.pytorch.org/v1alpha1",
        "kind": "MonarchMesh",
        "metadata": {"name": mesh_name(job, role), "namespace": job.namespace},
        "spec": {
            "replicas": num_hosts(job, role),
            "port": KUBERNETES_PORT,
            "podTemplate": {"spec": {"containers": [container]}},
        },
    }


def _resources(job: JobSettings) -> dict[str, str | int] | None:
    return {GPU_RESOURCE: job.gpus_per_host} if job.gpus_per_host else None
