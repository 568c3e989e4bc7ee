"""What vLLM offers no public way to: parts of its in-process scheduler, touched here alone.

Written against vLLM 0.32. The prefix cache finds a block by a hash that is chained over the request's blocks, with the
request's salt in the first one (`Request.block_hashes`, `cache_salt`): whoever changes the head of the chain decides
what a request may find, and under which name its future blocks are kept.
"""

from __future__ import annotations

from typing import Any

from forge_async.backends.vllm_seeds import SeedsAhead
from forge_async.policy.ports import Occupancy


class Inside:
    """The inside of one LLMEngine whose core runs in this process."""

    def __init__(self, engine: Any, *, draws_on_cpu: bool = False) -> None:
        """Take hold of the engine's parts, and let it do without what costs and brings nothing.

        Args:
            draws_on_cpu: whether tokens are drawn in this process, on a CPU.
        """
        self._engine, self._scheduler = engine, engine.engine_core.engine_core.scheduler
        self._num_preemptions = 0
        self._count_preemptions()
        if draws_on_cpu:
            self._spare_slots()
            self._spare_blocks()
            SeedsAhead(self.model_runner().sampler.topk_topp_sampler)

    def salt_anew(self, salt: str) -> None:
        """After a load: no request may be served from, or leave behind, anything that an earlier salt names.

        One that has not begun, or lost its KV, takes the new salt as if it came now. One that runs on its old KV gets
        names that only it can have: what it adds is of mixed versions and must never be found, not even by itself when
        it is preempted later.
        """
        for request in self._scheduler.requests.values():
            if request.num_computed_tokens:
                request.cache_salt = f"{salt}/{request.request_id}"
                request.block_hashes[:] = [
                    f"{request.cache_salt}/{number}".encode() for number in range(len(request.block_hashes))
                ]
            else:
                request.cache_salt = salt
                request.block_hashes.clear()
                request.update_block_hashes()

    def drop_kv(self) -> int:
        """Have the KV of all running requests computed again; returns the tokens concerned."""
        num_tokens = sum(request.num_computed_tokens for request in self._scheduler.running)
        before = self._num_preemptions
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._num_preemptions = before  # these were not for want of room
        return num_tokens

    def model_runner(self) -> Any:
        """What runs the model, in this process."""
        return self._engine.collective_rpc(lambda worker: worker.model_runner)[0]

    def occupancy(self) -> Occupancy:
        """How full the engine is."""
        num_running, num_waiting = self._scheduler.get_request_counts()
        return Occupancy(
            num_running=num_running,
            num_waiting=num_waiting,
            num_preemptions=self._num_preemptions,
            kv_usage=float(self._scheduler.kv_cache_manager.usage),
        )

    def _count_preemptions(self) -> None:
        """vLLM counts them only in statistics that cost time in every step."""
        preempt = self._scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self._num_preemptions += 1
            preempt(*args, **kwargs)

        self._scheduler._preempt_request = counted

    def _spare_slots(self) -> None:
        """Skip the allocation of KV where there is nothing to allocate: 5% of an engine of a small model.

        A running request whose last block has room for its next token, and more room after it, needs no block, gives
        none up and completes none that could be kept for others; vLLM finds that out anew for every token. It holds for
        full attention alone, where no block is given up before the request ends.
        """
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        manager = self._scheduler.kv_cache_manager
        kinds = manager.coordinator.single_type_managers
        if len(kinds) != 1 or type(kinds[0]) is not FullAttentionManager:
            return
        allocate, nothing, block_tokens = manager.allocate_slots, manager.empty_kv_cache_blocks, kinds[0].block_size

        def spared(request: Any, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **kwargs: Any) -> Any:
            inside = 0 < request.num_computed_tokens % block_tokens < block_tokens - 1
            if inside and num_new_tokens == 1 and not (num_lookahead_tokens or args or kwargs):
                return nothing
            return allocate(request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **kwargs)

        manager.allocate_slots = spared

    def _spare_blocks(self) -> None:
        """Skip looking up the blocks of a row that ended, for a connector that does not ask where it was: 2%."""
        connector = self._scheduler.connector
        if not getattr(connector, "asks_for_blocks", True):
            self._scheduler._connector_finished = lambda request: connector.request_finished(request, [])
