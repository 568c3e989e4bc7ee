"""Real backends as the contract suites want them; called inside a `Child`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def vllm_engine(folder: str, lora: dict[str, Any] | None = None, adapters_held: int = 1, **policy: Any) -> Any:
    """A vLLM engine for tiny models; `policy`: settings that differ."""
    from forge_async.backends.vllm_engine import VllmEngine
    from forge_async.core.versions import PolicyVersion
    from forge_async.learner.settings import LoraSettings
    from forge_async.policy.settings import PolicySettings

    sizes = {"max_model_tokens": 128, "max_sequences": 64, "max_batch_tokens": 1024, "kv_cache_bytes": 4 << 20}
    settings = PolicySettings(**(sizes | policy))
    adapters = {"lora": LoraSettings(**lora) if lora else None, "adapters_held": adapters_held}
    engine = VllmEngine(folder, settings, PolicyVersion(), **adapters)
    return _TestedEngine(engine)


def vllm_engine_on_two_ranks(folder: str, scratch: str) -> Any:
    """The same, its model on two tensor-parallel ranks; weights reach them through a store in the folder `scratch`."""
    from tests.ranks import EngineOnRanks

    return EngineOnRanks(folder, scratch)


class _TestedEngine:
    """The engine, and what a test does to it behind its back."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def num_threads(self) -> int:
        """With how many threads torch computes in this process."""
        return Threads().num

    def load_as_vllm_does(self, weights: dict[str, Any]) -> None:
        """vLLM's own loading, once the engine has run."""
        self._engine._model().load_weights(iter(weights.items()))

    def load_prepared(self, weights: dict[str, Any], version: Any) -> list[str]:
        """Load what another thread has prepared; returns the names that are left as they were."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as other:
            prepared = other.submit(self._engine.prepare, weights, version).result()
        self._engine.load(prepared, version)
        return sorted(prepared.keys() & weights.keys())

    def replace_layer(self, path: str, weights: dict[str, Any]) -> None:
        """Have one quantised layer compute with other weights, which it was never loaded with."""
        from forge_async.backends.vllm_quantized import _adopt

        quantized, version = self._engine._quantized, self._engine.version
        layers, _ = quantized.prepare(weights, version, version)
        _adopt(quantized._layers[path], layers[path].layer)

    def generate_as_vllm_does(self, requests: list[Any]) -> dict[str, Any]:
        """Completions by request id, made by vLLM's own sampler and its own allocation of KV."""
        sampler, manager = self._shortened()
        ours = sampler.forward, manager.allocate_slots
        sampler.forward, manager.allocate_slots = sampler.forward_cpu, type(manager).allocate_slots.__get__(manager)
        try:
            self._engine.add(requests)
            found: dict[str, Any] = {}
            while self._engine.num_unfinished():
                found |= {result.id: result.completions for result in self._engine.step()}
            return found
        finally:
            sampler.forward, manager.allocate_slots = ours

    def count_allocations(self) -> int:
        """How often vLLM was asked for room for a token since this was last called; 0 at first."""
        _, manager = self._shortened()
        counted = getattr(self, "_counted", None)
        if counted is None:
            coordinator, counted = manager.coordinator, [0]
            allocate = coordinator.allocate_new_blocks

            def count(*args: Any) -> Any:
                counted[0] += 1
                return allocate(*args)

            coordinator.allocate_new_blocks, self._counted = count, counted
        number, counted[0] = counted[0], 0
        return number

    def count_computed_tokens(self) -> int:
        """Tokens that went through the model since this was last called; 0 at first."""
        counted = getattr(self, "_computed", None)
        if counted is None:
            scheduler, counted = self._engine._inside._scheduler, [0]
            schedule = scheduler.schedule

            def count(*args: Any, **kwargs: Any) -> Any:
                plan = schedule(*args, **kwargs)
                counted[0] += plan.total_num_scheduled_tokens
                return plan

            scheduler.schedule, self._computed = count, counted
        number, counted[0] = counted[0], 0
        return number

    def num_families(self) -> int:
        """Prompts that rows still wait to share."""
        families = self._engine._inside._scheduler.connector._families
        return len(families._by_prompt) + len(families._of)

    def refuses_another_way_to_draw(self) -> str:
        """What is said to a vLLM whose sampler asks a generator for its numbers in another way."""
        from forge_async.backends.vllm_seeds import SeedsAhead
        from forge_async.core.errors import PolicyError

        class Later(type(self._shortened()[0])):
            def forward(self, logits: Any, generators: Any, k: Any, p: Any) -> Any:
                for generator in generators.values():
                    generator.manual_seed(generator.initial_seed() + 1)
                return self.forward_cpu(logits, generators, k, p)

        later = Later("processed_logprobs")
        later.forward = Later.forward.__get__(later)  # vLLM's own constructor has set another
        try:
            SeedsAhead(later)
        except PolicyError as error:
            return str(error)
        return ""

    def _shortened(self) -> tuple[Any, Any]:
        """The parts of vLLM that are spared work: its sampler and the keeper of its KV cache."""
        inside = self._engine._inside
        return inside.model_runner().sampler.topk_topp_sampler, inside._scheduler.kv_cache_manager


def titan_learner(
    folder: str,
    port: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    tensor_parallel: int = 1,
    logit_chunk_tokens: int = 2048,
    lr: float = 1e-3,
    temperature: float = 1.0,
    publish_dtype: str = "float32",
    objective: dict[str, Any] | None = None,
    correction: str = "token_is",
    updates_per_batch: int = 1,
    decay: str = "linear",
    lora: dict[str, Any] | None = None,
    merge_adapters: bool = False,
    expert_parallel: int = 1,
    dtype: str = "float32",
    activation_checkpointing: str = "none",
    reads_frozen: bool = True,
    compile: bool = False,
    threads: int = 1,
) -> Any:
    """A rank of a torchtitan learner; what was made before in this process is closed."""
    _enter_world(port, rank, ranks)
    from forge_async.backends.titan_learner import TitanLearner
    from forge_async.learner.loss import objective_loss
    from forge_async.learner.settings import LearnerSettings, LoraSettings, ObjectiveSettings, OptimizerSettings

    learner = TitanLearner(
        Path(folder),
        loss=objective_loss(ObjectiveSettings(**(objective or {})), correction),
        learner=LearnerSettings(
            ranks=ranks,
            tensor_parallel=tensor_parallel,
            logit_chunk_tokens=logit_chunk_tokens,
            updates_per_batch=updates_per_batch,
            expert_parallel=expert_parallel,
            dtype=dtype,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            threads=threads,
        ),
        optimizer=OptimizerSettings(lr=lr, warmup_steps=0, decay=decay),
        total_steps=10,
        seed=0,
        temperature=temperature,
        publish_dtype=publish_dtype,
        lora=LoraSettings(**lora) if lora else None,
        merge_adapters=merge_adapters,
        reads_frozen=reads_frozen,
    )
    _learners.append(learner)
    return learner


def titan_reference(
    policy_folder: str,
    port: int,
    folders: dict[str, str],
    *,
    rank: int = 0,
    ranks: int = 1,
    temperature: float = 1.0,
    row_tokens: int = 16,
    micro_batch_tokens: int = 64,
) -> Any:
    """A rank of a reference service; what was made before in this process is closed."""
    _enter_world(port, rank, ranks)
    from forge_async.backends.titan_frozen import TitanReference
    from forge_async.learner.settings import LearnerSettings

    reference = TitanReference(
        {name: Path(folder) for name, folder in folders.items()},
        policy_folder=Path(policy_folder),
        ranks=ranks,
        learner=LearnerSettings(row_tokens=row_tokens, micro_batch_tokens=micro_batch_tokens),
        temperature=temperature,
    )
    _learners.append(reference)
    return reference


def _enter_world(port: int, rank: int, ranks: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    if _learners:
        _learners.pop().close()


class Insides:
    """What the last learner of this process trains, for tests that look inside."""

    def trained(self) -> dict[str, list[str]]:
        """Names of parameters: in the state dict, with a gradient wanted, with a state of the optimiser."""
        learner = _learners[-1]
        wanted = {id(each): name for name, each in learner._model.named_parameters() if each.requires_grad}
        states = [each for optimizer in learner._optimizer for each in optimizer.state]
        return {
            "state_dict": sorted(learner._model.state_dict()),
            "gradient": sorted(wanted.values()),
            "optimizer": sorted(wanted.get(id(each), "frozen") for each in states),
        }


def own_device_of(kind: str) -> _Device:
    """Where a rank of this process's world computes, if its machine has devices of that kind."""
    return _Device(kind)


class _Device:
    def __init__(self, kind: str) -> None:
        from forge_async.backends.titan_world import own_device

        self.name = str(own_device(kind))


_learners: list[Any] = []


class Threads:
    """With how many threads torch computes in this process."""

    def __init__(self) -> None:
        import torch

        self.num = torch.get_num_threads()


class LearnerState:
    """What the learner that was built last in this process keeps."""

    def __init__(self) -> None:
        state = _learners[-1]._model.state_dict()
        tied = {"lm_head.weight"} if _learners[-1]._model.enable_weight_tying else set()
        self.names = sorted(state)
        self.num_elements = sum(value.numel() for name, value in state.items() if name not in tied)


def state_of_learner() -> LearnerState:
    """Its names and their sizes."""
    return LearnerState()


class BroadcastMember:
    """A reader of one sender's broadcasts, by itself."""

    def __init__(self, meeting: Any, sender: int, member_s: float) -> None:
        from forge_async.backends.broadcast_ends import Limits, Member

        self._member = Member(meeting, "gloo", sender, Limits(member_s=member_s, total_s=60.0)) if meeting else None

    def take(self, number: int) -> list[int] | None:
        """The first bytes of what was sent under a number; None when it did not come."""
        assert self._member is not None, "only its imports were wanted"
        value = self._member.take(number, (self._member._number,))
        return None if value is None else value[:8].tolist()


def broadcast_member(meeting: Any, sender: int, member_s: float) -> BroadcastMember:
    """Join the audience of a sender; without a meeting point, only import what that needs."""
    return BroadcastMember(meeting, sender, member_s)
