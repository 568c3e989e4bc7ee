"""The one tree of errors. A message names the thing, the value and the remedy; callers catch at boundaries only."""

from __future__ import annotations


class ForgeError(Exception):
    """Base of every error that forge_async raises on purpose.

    `exit_code` is what an application exits with when this error ends it: 2 for what the user can mend before
    starting again (a key, a path, a combination), 1 for what went wrong while running.
    """

    exit_code = 1


class ConfigError(ForgeError):
    """The configuration, a command line or a file that it names cannot be used as it is."""

    exit_code = 2


class MissingPackageError(ConfigError):
    """A package that this feature needs is absent or of an unsuited version; the message gives the install command."""


class ActorDiedError(ForgeError):
    """A process of the run ended without being asked to."""


class StallError(ForgeError):
    """Something waited past its deadline; the message names who waited, for what, and who should have answered."""


class StalenessError(ForgeError):
    """A sample older than the bound reached the consumer, or the ledger was asked for something that breaks a law."""


class FilterStallError(ForgeError):
    """Group after group ends without one that can be trained on; the message names the filter and the counts."""


class RewardError(ForgeError):
    """A reward function raised, hung, or returned something that is not a finite number."""


class LearnerError(ForgeError):
    """The learner cannot take a step."""


class NonFiniteError(LearnerError):
    """A loss or gradient is not finite; the message names the step and the groups of the batch."""


class PolicyError(ForgeError):
    """The policy's engine failed or refused a request."""


class RequestRefusedError(PolicyError):
    """The engine cannot serve one request; it goes on with the others."""


class WeightsError(ForgeError):
    """A version of the weights could not be published, found, or read whole."""


class DeltaError(WeightsError):
    """A version cannot be rebuilt from what changed since an older one; pulling it whole mends that."""


class FingerprintError(WeightsError):
    """What a replica serves is not what the manifest of its version says; names the first differing parameter."""


def one_sentence(error: BaseException) -> str:
    """Return the innermost cause of `error` as one line, for the last line of a failed run.

    Exception groups (asyncio's TaskGroup raises them) are opened to their first member that is ours, or else to
    their first member.
    """
    error = unwrap(error)
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, ForgeError) else f"{type(error).__name__}: {text}"


def unwrap(error: BaseException) -> BaseException:
    """Return the member of nested exception groups that tells most: the first ForgeError, else the first one."""
    while isinstance(error, BaseExceptionGroup):
        leaves = list(_leaves(error))
        error = next((leaf for leaf in leaves if isinstance(leaf, ForgeError)), leaves[0])
    return error


def _leaves(group: BaseExceptionGroup):
    for member in group.exceptions:
        if isinstance(member, BaseExceptionGroup):
            yield from _leaves(member)
        else:
            yield member
