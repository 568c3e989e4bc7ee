"""Reading a version with what it builds on, and comparing both with what is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from forge_async.core.versions import PolicyVersion
from forge_async.weights.fingerprint import Read, check_fingerprint, sample
from forge_async.weights.manifest import Manifest
from forge_async.weights.packing import Unpacker
from forge_async.weights.plane import ReadReport, WeightPlane

if TYPE_CHECKING:
    import torch


@asynccontextmanager
async def reading_weights(
    plane: WeightPlane, unpacker: Unpacker, version: PolicyVersion, base: str
) -> AsyncIterator[tuple[dict[str, torch.Tensor], list[Manifest], ReadReport]]:
    """Enter to get the weights of a version, its manifest, and what reading took; they are good until the exit.

    A reader that holds another base than the version builds on, because it came late, is given that base too: its
    weights among the others, its manifest after the first.

    Args:
        base: version whose frozen weights the reader holds; "": none.

    Raises WeightsError for a version that is not readable.
    """
    async with AsyncExitStack() as held:
        manifest, blobs = await held.enter_async_context(plane.reading(version))
        weights, manifests = await asyncio.to_thread(unpacker.unpack, manifest, blobs), [manifest]
        report = plane.last_read
        if manifest.base not in ("", base):
            below, blobs = await held.enter_async_context(plane.reading(PolicyVersion.parse(manifest.base)))
            # Once in a reader's life, so it needs no memory that is used again.
            weights = await asyncio.to_thread(Unpacker(shared=False).unpack, below, blobs) | weights
            manifests.append(below)
            report = report.with_base(plane.last_read)
        yield weights, manifests, report


def check_served(manifests: Sequence[Manifest], read: Read, who: str, verify: str) -> None:
    """Compare what is served with manifests, of which each overrides those after it.

    Args:
        verify: `sampled` or `full`, as `weights.verify`.

    Raises FingerprintError naming the first differing parameter.
    """
    told: set[str] = set()
    for manifest in manifests:
        names = sample(manifest) if verify == "sampled" else manifest.names()
        check_fingerprint(manifest, read, who, [name for name in names if name not in told])
        told |= set(manifest.names())
