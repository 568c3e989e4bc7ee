"""Does a replica serve what its manifest says? Compared slice by slice on what is read back from the engine (Law 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from forge_async.core.errors import FingerprintError
from forge_async.weights.manifest import Manifest, Shard
from forge_async.weights.packing import digest, slices

Read = Callable[[Iterable[str]], Iterator[tuple[str, Any]]]
"""Yields (name, tensor) of what is really served, for the names asked."""

SAMPLED_BYTES = 4 << 20
"""A sampled comparison reads about this much, a millisecond's work, whatever the size of the model."""


def check_fingerprint(manifest: Manifest, read: Read, who: str, names: Iterable[str] | None = None) -> None:
    """Compare the digests of served slices with the manifest's.

    Args:
        manifest: of the version that should be served. Without digests only shapes and dtypes are compared.
        read: reads back from the engine.
        who: names the replica in the error.
        names: parameters to compare; None: all of them.

    Raises FingerprintError naming the first differing parameter, in the order of the manifest.
    """
    by_name = manifest.by_name()
    unread = set(by_name if names is None else names)
    for name, tensor in read([name for name in by_name if name in unread]):
        unread.discard(name)
        for shard in by_name[name]:
            _compare(manifest, shard, tensor, who)
    if unread:
        raise FingerprintError(
            f"{who} pulled {manifest.version}, but serves no {min(unread)}; it must not serve. "
            "Check that model.path is the same for learner and policy."
        )


def sample(manifest: Manifest) -> list[str]:
    """Names for a cheap comparison: other ones with each version, so that all have their turn.

    About `SAMPLED_BYTES` in all, and one parameter at least.
    """
    names, step = list(manifest.by_name()), manifest.version.step
    chosen, left = [], SAMPLED_BYTES
    stride = max(1, len(names) // 16)
    for turn in range(len(names)):
        name = names[(step + turn * stride) % len(names)]
        size = sum(shard.num_bytes for shard in manifest.by_name()[name])
        if chosen and (size > left or turn >= 16 or name in chosen):
            break
        chosen.append(name)
        left -= size
    return chosen


def _compare(manifest: Manifest, shard: Shard, tensor: Any, who: str) -> None:
    if tuple(tensor.shape) != shard.global_shape:
        raise FingerprintError(
            f"{who} holds {shard.name} with shape {tuple(tensor.shape)}, and {manifest.version} has "
            f"{shard.global_shape}; it must not serve. Check that model.path is the same for both."
        )
    wanted = manifest.digest_of(shard)
    if _dtype(tensor) != shard.dtype or (wanted is not None and digest(tensor[slices(shard)]) != wanted):
        raise FingerprintError(
            f"{who} pulled {manifest.version}, but {shard.name} as it is served differs from what the learner "
            "published; it must not serve."
        )


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
