"""Does a replica serve what its manifest says? Compared slice by slice on what is read back from the engine (Law 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from forge_async.core.errors import FingerprintError
from forge_async.weights.manifest import Manifest
from forge_async.weights.packing import digest, slices


def check_fingerprint(manifest: Manifest, read: Callable[[Iterable[str]], Iterator[tuple[str, Any]]], who: str) -> None:
    """Compare the digests of all served slices with the manifest's.

    Args:
        manifest: of the version that should be served.
        read: yields (name, tensor) of what is really served, for the names asked.
        who: names the replica in the error.

    Raises FingerprintError naming the first differing parameter, in the order of the manifest.
    """
    by_name = manifest.by_name()
    unread = set(by_name)
    for name, tensor in read(by_name):
        unread.discard(name)
        for shard in by_name[name]:
            if tuple(tensor.shape) != shard.global_shape:
                raise FingerprintError(
                    f"{who} holds {name} with shape {tuple(tensor.shape)}, and {manifest.version} has "
                    f"{shard.global_shape}; it must not serve. Check that model.path is the same for both."
                )
            if str(tensor.dtype).removeprefix("torch.") != shard.dtype or digest(tensor[slices(shard)]) != shard.digest:
                raise FingerprintError(
                    f"{who} pulled {manifest.version}, but {name} as it is served differs from what the learner "
                    "published; it must not serve."
                )
    if unread:
        raise FingerprintError(
            f"{who} pulled {manifest.version}, but serves no {min(unread)}; it must not serve. "
            "Check that model.path is the same for learner and policy."
        )
