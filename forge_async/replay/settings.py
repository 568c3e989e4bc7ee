"""The dials of asynchrony."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting

AUTO = "auto"
"""Word for `max_staleness`: measured while the run goes on."""

SWAP_MODES = ("keep_kv", "recompute_kv", "abort_resume", "abort_retry", "drain", "blocking")
BUFFERS = ("none", "double", "bounded", "stream")
CORRECTIONS = (
    "token_is", "none", "token_truncated", "token_masked", "icepop", "sequence_truncated", "sequence_masked",
    "geometric_mask", "off_policy_mask", "aipo", "decoupled", "decoupled_approx", "vtrace",
)  # fmt: skip
PRESET_AGES = {"none": 0, "double": 1}
"""S of the buffers that set it; they take groups in strict order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSettings:
    """Keys under `async`."""

    max_staleness: int | str = setting(
        2,
        "S: hard bound on the age of any token that is trained on; 0: synchronous; auto: as measured, up to the cap",
        unit="steps",
        low=0,
        words=(AUTO,),
    )
    max_staleness_cap: int = setting(8, "greatest S that max_staleness=auto may choose", unit="steps", low=1)
    buffer: str = setting(
        "bounded", "none: S=0; double: S=1, W=1; bounded: S and W as given; stream: no age bound", choices=BUFFERS
    )
    max_queue_tokens: int = setting(
        16_000_000, "depth cap in tokens; one oversize group is admitted alone", unit="tokens", low=1
    )
    window: int = setting(
        1, "W: how far the learner may look past a straggling group; 1 is strict order", unit="groups", low=1
    )
    order: str = setting(
        "windowed_fifo",
        "which ready group goes first: fifo (strict), or inside the window by admission or the freshest",
        choices=("fifo", "windowed_fifo", "freshest"),
    )
    publish_every: int = setting(1, "learner steps between publications of the weights", unit="steps", low=1)
    swap: str = setting("keep_kv", "what happens to requests in flight when weights arrive", choices=SWAP_MODES)
    on_stale: str = setting(
        "wait",
        "what to do with groups that a fault or resume made older than S",
        choices=("wait", "drop", "reweight", "raise"),
    )
    max_attempts: int = setting(
        5, "tries of a group that come to nothing before it ends as failed, resumed runs included", unit="tries", low=1
    )
    max_filtered_batches: int = setting(
        10,
        "groups, in batches, that may end filtered or failed in a row, with none ready, before the run stops",
        unit="batches",
        low=1,
    )
    fresh_fraction: float = setting(
        0.0, "share of each batch made wholly by the newest version, beside the rest with S", low=0.0, high=1.0
    )
    correction: str = setting(
        "token_is",
        "how the loss makes up for age and mismatch, docs/objectives.md; token_is: the objective's own ratio is taken "
        "against the sampler; none: samples count as new; sets the keys of correction.* that it needs",
        choices=CORRECTIONS,
    )
    force_uncorrected: bool = setting(False, "allow correction=none with max_staleness above 0")

    @property
    def highest_staleness(self) -> int | None:
        """The greatest S that can be in force in a run, in steps; None: `stream` has no bound on age."""
        if self.buffer == "stream":
            return None
        given = self.max_staleness_cap if isinstance(self.max_staleness, str) else self.max_staleness
        return PRESET_AGES.get(self.buffer, given)

    @property
    def takes_ahead(self) -> bool:
        """Whether the batch of a step is taken while the step before it trains.

        Not where the freshest groups come first: an early choice would be one among older groups.
        """
        return self.order != "freshest"
