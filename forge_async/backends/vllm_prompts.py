"""The prompt of a group, computed once on a CPU: by one of its rows, whose KV the others copy.

vLLM's prefix cache shares whole blocks of KV, and a block has 32 tokens on a CPU: every row of a group computes what
its prompt has beyond the last full one, of a short prompt all. Here rows with the same prompt and the same salt are a
family. The first that enters leads: it computes the prompt. The others compute the prompt's last token alone and copy
the leader's KV of the rest, those that enter in the same step too: layer by layer, between the step's writing of KV and
its reading. `vllm_prompt_connector.py` brings this to vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forge_async.policy.settings import PolicySettings


def sharing(settings: PolicySettings, *, here: bool) -> dict[str, Any]:
    """Arguments of an engine that shares prompts; `here`: whether it computes in this process, on a CPU.

    One whose settings forbid it has the connector all the same: vLLM has one in a process, for all engines or none.
    """
    if not here:
        return {}
    from vllm.config import KVTransferConfig

    # Of the experts a token took a record is kept by the place of its KV, and copies have another place.
    shares = settings.prefix_cache and not settings.keep_routing
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="PromptConnector",
            kv_connector_module_path="forge_async.backends.vllm_prompt_connector",
            kv_role="kv_both",
            kv_connector_extra_config={"shares": shares},
        )
    }


@dataclass(slots=True)
class _Family:
    """Rows with the same prompt that came under the same salt, until the last of them has entered."""

    num_waiting: int = 0
    leader: Any = None
    """The request whose KV the others copy; None until one has entered."""
    salt: str | None = None
    """The leader's when it entered: a load gives those that wait another one, and its KV is then not for them."""


class Families:
    """Which rows have a prompt in common, from vLLM's requests as its scheduler tells of them."""

    def __init__(self) -> None:
        self._by_prompt: dict[Any, _Family] = {}
        self._of: dict[str, tuple[Any, _Family]] = {}
        """(prompt, family) of requests that have not entered, by their ids."""
        self._entering: set[str] = set()
        """Requests that enter in the step that is being planned, which computes their prompts whole."""

    def came(self, request: Any) -> None:
        """A request was added and waits."""
        prompt = request.cache_salt, tuple(request.prompt_token_ids)
        family = self._by_prompt.setdefault(prompt, _Family())
        family.num_waiting += 1
        self._of[request.request_id] = prompt, family

    def num_shared(self, request: Any, num_computed: int) -> int:
        """Tokens that a waiting request may copy beyond `num_computed`, where it enters in the step being planned."""
        return max(request.num_prompt_tokens - 1 - num_computed, 0) if self._leader(request) else 0

    def entered(self, request: Any) -> Any:
        """A request enters in this step; returns its leader, None where it computes its prompt itself."""
        leader = self._leader(request)
        family = self._forget(request)
        if family is not None and leader is None:
            family.leader, family.salt = request, request.cache_salt
            self._entering.add(request.request_id)
        return leader

    def planned(self) -> None:
        """The step is planned; what comes now belongs to the next one."""
        self._entering.clear()

    def left(self, request: Any) -> None:
        """A request has ended, perhaps without having entered."""
        self._forget(request)

    def _leader(self, request: Any) -> Any:
        """Whose KV of the whole prompt a request may copy in this step; None where there is nobody's."""
        _, family = self._of.get(request.request_id, (None, None))
        if family is None or family.leader is None or family.salt != request.cache_salt or family.leader.is_finished():
            return None
        # A leader of an earlier step has lost its KV when it was preempted, and counts from 0 again.
        leader = family.leader
        is_whole = leader.request_id in self._entering or leader.num_computed_tokens >= leader.num_prompt_tokens
        return leader if is_whole else None

    def _forget(self, request: Any) -> _Family | None:
        prompt, family = self._of.pop(request.request_id, (None, None))
        if family is not None:
            family.num_waiting -= 1
            if not family.num_waiting:
                del self._by_prompt[prompt]
        return family
