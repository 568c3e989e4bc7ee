"""Reading a version with what it builds on, and comparing both with what is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from forge_async.core.errors import FingerprintError
from forge_async.core.threads import to_thread_and_back
from forge_async.core.versions import PolicyVersion
from forge_async.weights.fingerprint import check_fingerprint, sample
from forge_async.weights.manifest import Manifest
from forge_async.weights.packing import Unpacker
from forge_async.weights.plane import WeightPlane
from forge_async.weights.records import ReadReport

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
        weights, manifests = await to_thread_and_back(unpacker.unpack, manifest, blobs), [manifest]
        report = plane.last_read
        if manifest.base not in ("", base):
            below, blobs = await held.enter_async_context(plane.reading(PolicyVersion.parse(manifest.base)))
            # Once in a reader's life, so it needs no memory that is used again.
            weights = await to_thread_and_back(Unpacker(shared=False).unpack, below, blobs) | weights
            manifests.append(below)
            report = report.with_base(plane.last_read)
        yield weights, manifests, report


class Served(Protocol):
    """What an engine lets be seen of its weights; `policy.ports.Engine` has all of it."""

    sealed: frozenset[str]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]: ...

    def first_wrong(self, names: Iterable[str]) -> str: ...


def check_served(manifests: Sequence[Manifest], engine: Served, who: str, verify: str) -> None:
    """Compare what is served with manifests, of which each overrides those after it.

    Parameters that the engine has sealed are compared by what it computes with them.

    Args:
        verify: `sampled` or `full`, as `weights.verify`.

    Raises FingerprintError naming the first differing parameter.
    """
    told: set[str] = set()
    for manifest in manifests:
        names = sample(manifest) if verify == "sampled" else manifest.names()
        asked = [name for name in names if name not in told]
        check_fingerprint(manifest, engine.read, who, [name for name in asked if name not in engine.sealed])
        if wrong := engine.first_wrong([name for name in asked if name in engine.sealed]):
            raise FingerprintError(
                f"{who} pulled {manifest.version}, but does not compute with {wrong} as it was pulled; it must not "
                "serve."
            )
        told |= set(manifest.names())
