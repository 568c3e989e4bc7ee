"""Figures of a metrics row that are put together from what several processes report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forge_async.observe import names
from forge_async.observe.process_stats import process_stats
from forge_async.pipeline.ports import LearnerStep, Pull, ReplicaStats, WorkerReport


def memory_figures(
    ranks: Sequence[LearnerStep],
    replicas: Mapping[str, ReplicaStats],
    reports: Sequence[WorkerReport],
    *,
    pids: Mapping[str, int],
    held_bytes: Mapping[str, int],
) -> dict[str, float]:
    """Resident memory and CPU seconds of each process, and what a weight sync holds on top.

    Args:
        ranks: the learner's, in order.
        replicas: by name.
        reports: of the rollout workers, in order.
        pids: processes of this machine that report nothing themselves, by name; one that has ended is left out.
        held_bytes: what each replica's last pull held, by its name.
    """
    processes = {f"learner_{i}": (rank.rss_bytes, rank.cpu_s) for i, rank in enumerate(ranks)}
    processes |= {name: (each.rss_bytes, each.cpu_s) for name, each in replicas.items()}
    processes |= {f"rollout_{i}": (report.rss_bytes, report.cpu_s) for i, report in enumerate(reports)}
    for name, pid in pids.items():
        if (found := process_stats(pid)) is not None:
            processes[name] = (found.rss_bytes, found.cpu_s)
    held = {f"learner_{i}": rank.snapshot_bytes for i, rank in enumerate(ranks)} | dict(held_bytes)
    row: dict[str, float] = {
        names.RSS_BYTES: sum(rss for rss, _ in processes.values()),
        names.SYNC_PEAK_BYTES: max(held.values(), default=0),
    }
    for name, (rss, cpu_s) in processes.items():
        row[names.per_process(names.RSS_BYTES, name)] = rss
        row[names.per_process(names.CPU_S, name)] = cpu_s
    row.update({names.per_process(names.SYNC_PEAK_BYTES, name): value for name, value in held.items()})
    return row


def transport_line(pull: Pull) -> str:
    """Which transport carried a pull, and at what rate."""
    megabytes, took_s = pull.num_bytes / 1e6, max(pull.fetch_s + pull.pause_s, 1e-9)
    return f"{pull.transport}, {megabytes:.3g} MB in {1e3 * took_s:.0f} ms ({megabytes / took_s:.3g} MB/s)"


def reference_figures(reports: Sequence[WorkerReport], step_s: float) -> dict[str, float]:
    """How long workers waited for the reference service, if there is one."""
    waits = [report.reference_s for report in reports if report.reference_s is not None]
    return {names.REFERENCE_BUSY: min(1.0, sum(waits) / len(waits) / step_s)} if waits else {}


def engine_figures(stats: Sequence[ReplicaStats]) -> dict[str, float]:
    """How full the engines are, and what swaps have cost since the step before."""
    swaps = [swap for each in stats for swap in each.service.swap_records]
    return {
        names.DISCARDED_TOKENS: sum(swap.discarded_tokens for swap in swaps),
        names.RECOMPUTED_TOKENS: sum(swap.recomputed_tokens for swap in swaps),
        names.KV_USAGE: max((each.kv_usage for each in stats), default=0.0),
        names.QUEUED_REQUESTS: sum(each.num_queued for each in stats),
        names.PREEMPTIONS: sum(each.num_preemptions for each in stats),
        names.LIMIT_SEQUENCES: max((each.limit_sequences for each in stats), default=0),
    }
