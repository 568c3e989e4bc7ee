"""The specification of a job, word for word; and that Monarch's own classes would ask for the same."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest
import yaml

from forge_async.config.job import JobSettings
from forge_async.core.errors import ConfigError, MissingPackageError
from forge_async.runtime import jobs

SLURM = JobSettings(
    kind="slurm",
    name="qwen",
    learner_hosts=1,
    policy_hosts=2,
    gpus_per_host=8,
    partition="gpu",
    time_limit="04:00:00",
    slurm_args=["--account=mine"],
)
KUBERNETES = JobSettings(
    kind="kubernetes", name="qwen-3", policy_hosts=2, gpus_per_host=4, namespace="rl", image="registry/forge:1"
)

LOCAL_TEXT = """\
job: local
name: forge-async
placement:
  learner:
    hosts: 1
    processes_per_host: 2
  policy:
    hosts: 1
    processes_per_host: 1
controller: this host
"""

SLURM_TEXT = """\
job: slurm
name: qwen
placement:
  learner:
    hosts: 1
    processes_per_host: 8
  policy:
    hosts: 2
    processes_per_host: 4
controller: this host
---
SlurmJob:
  meshes:
    learner: 1
    policy: 2
  job_name: qwen
  partition: gpu
  time_limit: 04:00:00
  gpus_per_node: 8
  slurm_args:
  - --account=mine
  monarch_port: 22222
  log_dir: logs
sbatch:
- --job-name=qwen_<pid>
- --ntasks-per-node=1
- --nodes=3
- --output=logs/slurm_%j_qwen_<pid>.out
- --error=logs/slurm_%j_qwen_<pid>.err
- --time=04:00:00
- --gpus-per-node=8
- --exclusive
- --partition=gpu
- --account=mine
"""

REFERENCE_TEXT = """\
  reference:
    hosts: 2
    processes_per_host: 3
controller: this host
---
SlurmJob:
  meshes:
    learner: 1
    policy: 2
    reference: 2
"""

BESIDE_THE_LEARNER_TEXT = """\
  reference:
    where: the first of the learner's hosts
    processes: 2
controller: this host
---
SlurmJob:
  meshes:
    learner: 1
    policy: 2
  job_name: qwen
"""

KUBERNETES_TEXT = """\
job: kubernetes
name: qwen-3
placement:
  learner:
    hosts: 1
    processes_per_host: 4
  policy:
    hosts: 2
    processes_per_host: 1
controller: this host
---
apiVersion: monarch.pytorch.org/v1alpha1
kind: MonarchMesh
metadata:
  name: qwen3learner
  namespace: rl
spec:
  replicas: 1
  port: 26600
  podTemplate:
    spec:
      containers:
      - name: worker
        image: registry/forge:1
        command:
        - python
        - -u
        - -c
        - <Monarch's worker loop>
        env:
        - name: MONARCH_PORT
          value: '26600'
        - name: MONARCH_SERVICE_PROC_RANK
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
        - name: MONARCH_SERVICE_PROC_IDS
          value: <drawn when submitted>
        resources:
          requests:
            nvidia.com/gpu: '4'
          limits:
            nvidia.com/gpu: '4'
---
apiVersion: monarch.pytorch.org/v1alpha1
kind: MonarchMesh
metadata:
  name: qwen3policy
  namespace: rl
spec:
  replicas: 2
  port: 26600
"""


def test_a_local_run_is_described():
    assert jobs.describe(JobSettings(), learner_procs=2) == LOCAL_TEXT
    process = jobs.describe(JobSettings(kind="process"), learner_procs=2)
    assert process == LOCAL_TEXT.replace("job: local", "job: process")


def test_a_slurm_job_is_described_word_for_word():
    assert jobs.describe(SLURM, learner_procs=8, policy_procs=8) == SLURM_TEXT


def test_a_reference_service_has_hosts_of_its_own_or_a_place_on_the_learners():
    own = jobs.describe(dataclasses.replace(SLURM, reference_hosts=2), policy_procs=2, reference_procs=6)
    assert REFERENCE_TEXT in own and "--nodes=5" in own
    beside = jobs.describe(SLURM, policy_procs=2, reference_procs=2)
    assert BESIDE_THE_LEARNER_TEXT in beside and "--nodes=3" in beside
    pods = jobs.describe(dataclasses.replace(KUBERNETES, reference_hosts=3), policy_procs=2, reference_procs=3)
    learner, _, reference = list(yaml.safe_load_all(pods))[1:]
    assert (reference["metadata"]["name"], reference["spec"]["replicas"]) == ("qwen3reference", 3)
    assert reference["spec"]["podTemplate"] == learner["spec"]["podTemplate"]


def test_a_kubernetes_job_is_described_word_for_word():
    text = jobs.describe(KUBERNETES, learner_procs=4, policy_procs=2)
    assert text.startswith(KUBERNETES_TEXT)
    assert text == jobs.describe(KUBERNETES, learner_procs=4, policy_procs=2)
    learner, policy = list(yaml.safe_load_all(text))[1:]
    assert policy["spec"]["podTemplate"] == learner["spec"]["podTemplate"]


@pytest.mark.parametrize(
    ("job", "sizes", "message"),
    [
        (JobSettings(kind="kubernetes"), {}, "job.image is empty"),
        (JobSettings(kind="kubernetes", image="x", name="3"), {}, "job.name=3 makes no Kubernetes name"),
        (
            dataclasses.replace(KUBERNETES, name="n" * 55, reference_hosts=1),
            {"policy_procs": 2},
            "use at most 54 letters",
        ),
        (JobSettings(learner_hosts=2), {}, "job.learner_hosts=2 and job.policy_hosts=1 must be 1"),
        (JobSettings(reference_hosts=1), {}, "job.kind=local has no job.reference_hosts=1; use 0, or"),
        (JobSettings(kind="process", reference_hosts=2), {}, "job.reference_hosts=2; use 1 or 0, or"),
        (
            dataclasses.replace(SLURM, reference_hosts=2),
            {"policy_procs": 2, "reference_procs": 3},
            "3 reference processes do not spread evenly over job.reference_hosts=2",
        ),
        (SLURM, {"policy_procs": 3}, "3 policy processes do not spread evenly over job.policy_hosts=2"),
        (SLURM, {"learner_procs": 9, "policy_procs": 2}, "9 learner processes a host need a GPU each"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(job, sizes, message):
    with pytest.raises(ConfigError, match=message):
        jobs.describe(job, **sizes)


def test_a_local_run_has_no_job_to_build():
    with pytest.raises(ConfigError, match="job.kind=local starts no job"):
        jobs.build(JobSettings(), log_dir="logs")


@pytest.mark.skipif(bool(importlib.util.find_spec("kubernetes")), reason="kubernetes is installed")
def test_a_missing_kubernetes_package_is_named_with_its_install_command():
    with pytest.raises(MissingPackageError, match="pip install kubernetes"):
        jobs.build(KUBERNETES, log_dir="logs")


def in_a_process_of_its_own(code, folder, **environment):
    """Run Python there, because building a cluster's job changes Monarch's transport for good."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.stack
@pytest.mark.parametrize("reference_hosts", [0, 2])
def test_monarch_asks_sbatch_for_what_is_described(tmp_path, reference_hosts):
    settings = dataclasses.replace(SLURM, reference_hosts=reference_hosts)
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\ncat > "{tmp_path}/script"\necho Submitted batch job 7\n')
    sbatch.chmod(0o755)
    pid = in_a_process_of_its_own(
        f"""
        import os
        from forge_async.config.job import JobSettings
        from forge_async.runtime import jobs
        job = jobs.build({settings!r}, log_dir="logs")
        job._submit_slurm_job(sum(job._meshes.values()))
        print(os.getpid())
        """,
        tmp_path,
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    ).strip()
    asked = [line[8:] for line in (tmp_path / "script").read_text().splitlines() if line.startswith("#SBATCH ")]
    assert asked == [directive.replace("<pid>", pid) for directive in jobs.sbatch_directives(settings, "logs")]


@pytest.mark.stack
@pytest.mark.skipif(not importlib.util.find_spec("kubernetes"), reason="needs the kubernetes package")
def test_monarch_creates_the_pods_that_are_described(tmp_path):
    built = in_a_process_of_its_own(
        f"""
        import json
        from kubernetes import client
        from forge_async.config.job import JobSettings
        from forge_async.runtime import jobs
        job = jobs.build({KUBERNETES!r}, log_dir="logs")
        mesh = job._meshes["qwen3learner"]
        ids = job._allocate_service_proc_ids(1)
        pod = job._build_worker_pod_template(mesh["image_spec"], mesh["port"], ids)
        print(json.dumps([sorted(job._meshes), client.ApiClient().sanitize_for_serialization(pod)]))
        """,
        tmp_path,
    )
    names, pod = json.loads(built.splitlines()[-1])
    described = jobs.manifest(KUBERNETES, "learner")["spec"]["podTemplate"]
    container, expected = pod["spec"]["containers"][0], described["spec"]["containers"][0]
    container["command"][3], container["env"][2]["value"] = expected["command"][3], expected["env"][2]["value"]
    assert names == ["qwen3learner", "qwen3policy"]
    assert pod == described
