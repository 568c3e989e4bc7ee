"""Which prompts are kept for evaluation or demonstrations, by a hash of their text: stable across sources and runs."""

from __future__ import annotations

import hashlib
import zlib
from fractions import Fraction
from functools import lru_cache

from forge_async.core.errors import ForgeError
from forge_async.core.records import PromptId


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a prompt is kept for evaluation, for a share `fraction` of all texts.

    At 0.2 these are the texts whose crc32 is divisible by 5, which is the split of the recipe; in general
    `crc32 % q < p` for the fraction p/q.
    """
    share = _share(fraction)
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % share.denominator < share.numerator


def is_demonstration(text: str, fraction: float) -> bool:
    """Whether a prompt that is not held out is kept for demonstrations, for a share `fraction` of those.

    Decided by a hash that mixes all bits of the text, so that neither share can be told from the text's letters.
    """
    share = _share(fraction)
    found = hashlib.blake2b(b"demonstration:" + text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(found.digest(), "big") % share.denominator < share.numerator


def is_demonstration_by_crc(text: str, fraction: float) -> bool:
    """As `is_demonstration`, by a checksum: how `spell` was split first, kept so that its warm start stays as it is.

    A checksum's bits are sums (exclusive or) of the text's bits. At a share of 1/2 two texts of one length are on the
    same side where some of their bits have the same parity: of single-digit sums the demonstrations then show one
    parity of digits only, and a model learns nothing about the other.
    """
    share = _share(fraction)
    found = zlib.crc32(b"demonstration:" + text.encode("utf-8", "surrogatepass"))
    return found % share.denominator < share.numerator


@lru_cache(maxsize=64)
def _share(fraction: float) -> Fraction:
    """The fraction p/q that a share is taken for; finding it costs more than the hash."""
    return Fraction(fraction).limit_denominator(1000)


def held_out_id(source: str, index: int) -> PromptId:
    """The id of a held-out prompt, which no training prompt can have."""
    return PromptId(source=f"{source}/held_out", epoch=0, index=index)


def check_id(id: PromptId, source: str, num_prompts: int) -> None:
    """Raise ForgeError unless `id` lies in an epoch of `num_prompts` prompts of `source`."""
    if id.source != source:
        raise ForgeError(f"Prompt {id} was asked of source {source}: route it to the source of its name.")
    if id.epoch < 0 or not 0 <= id.index < num_prompts:
        raise ForgeError(f"Prompt {id} does not exist: an epoch of {source} has indices 0 to {num_prompts - 1}.")
