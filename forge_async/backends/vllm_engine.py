"""vLLM behind the policy room's Engine port: the engine core runs in this process, stepped by its owner.

Facts that shape this file, measured on vLLM 0.32:
- with the engine core in-process, weights can be loaded between two steps with requests in flight;
- vLLM stamps tokens with the weight version that made them, exact at the boundary;
- on CPU, linear layers are repacked by oneDNN after loading unless it is switched off, and a repacked layer can
  neither be loaded into nor read back;
- the prefix cache is keyed by a salt that a request carries; each load has a salt of its own, and requests that a load
  finds in the engine are salted anew (`vllm_inside.py`), so that versions never share entries.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_async.backends import vllm_quantized
from forge_async.backends.hf_renderer import HfRenderer
from forge_async.backends.vllm_adapter import AdapterSlots, adapters_of, engine_arguments
from forge_async.backends.vllm_alone import alone
from forge_async.backends.vllm_inside import Inside
from forge_async.backends.vllm_outputs import LENGTH, Finished, Outputs, Row
from forge_async.backends.vllm_places import Places
from forge_async.backends.vllm_process import prepare
from forge_async.backends.vllm_prompts import sharing
from forge_async.backends.vllm_quantized import Quantized, QuantizedLayers
from forge_async.backends.vllm_rank_weights import RankWeights, build_on_ranks
from forge_async.backends.vllm_routing import RoutingRecorder
from forge_async.core import kept_sets
from forge_async.core.errors import PolicyError, WeightsError
from forge_async.core.packages import require
from forge_async.core.records import Completions
from forge_async.core.versions import PolicyVersion, VersionRuns
from forge_async.learner.settings import LoraSettings
from forge_async.policy.ports import GenerationRequest, GenerationResult, Occupancy
from forge_async.policy.settings import PolicySettings
from forge_async.policy.stop_strings import StopWatcher
from forge_async.weights.adapters import is_adapter

if TYPE_CHECKING:
    from forge_async.backends.vllm_executor import Ranks

TIED_TOKENS = 16
"""Room in a kept set beside top_k: where tokens share the k-th place, vLLM keeps all of them (on a CPU; on a GPU k)."""


class VllmEngine:
    """One vLLM engine. Built on, and used from, a single thread."""

    def __init__(
        self,
        model_folder: str,
        settings: PolicySettings,
        version: PolicyVersion,
        seed: int = 0,
        *,
        ranks: Ranks | None = None,
        lora: LoraSettings | None = None,
        adapters_held: int = 1,
    ) -> None:
        """Build the engine with weights of no meaning; `load` brings the first real ones.

        Args:
            model_folder: Hugging Face folder; its configuration is read, and its tokenizer for stop strings.
            settings: sizes and dtype.
            version: what is stamped until the first load.
            seed: of draws whose request names none.
            ranks: the processes that hold the model together; None: this one holds all of it.
            lora: the adapters that `load` may be given, by an engine in this process alone; None: none.
            adapters_held: so many adapters are held at once, those of requests in flight among them.
        """
        begun = time.perf_counter()
        require("vllm", feature="the policy engine")
        on_cpu = prepare(settings.compile, threads=settings.threads, keeps_routing=settings.keep_routing)
        from vllm import EngineArgs, LLMEngine
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import SamplingParams

        self.import_s = time.perf_counter() - begun
        self._params_class = SamplingParams
        self._refusals = (ValueError, VLLMError)
        arguments = _arguments(model_folder, settings, seed, on_cpu) | engine_arguments(lora, adapters_held, on_cpu)
        if settings.quantize != "none" and (ranks or lora):
            raise PolicyError(
                f"policy.quantize={settings.quantize} is for an engine of one process without adapters; leave it out, "
                "or give policy.tensor_parallel=1 and no lora."
            )
        arguments |= vllm_quantized.engine_arguments(settings.quantize)
        arguments |= sharing(settings, here=on_cpu and ranks is None)
        self._ranks: RankWeights | None = None
        if ranks is None:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        else:
            self._engine, self._ranks = build_on_ranks(ranks, arguments)
        self.build_s = time.perf_counter() - begun - self.import_s
        self._outputs = Outputs(self._engine)
        self._inside = Inside(self._engine, draws_on_cpu=on_cpu and ranks is None)
        self._slots = AdapterSlots(self._inside.model_runner(), lora, adapters_held, version) if lora else None
        self.versions_held = adapters_held
        self._folder = model_folder
        self._renderer: HfRenderer | None = None
        """The tokenizer, once a stop string has asked for text."""
        self._vocab_size = int(self._engine.model_config.get_vocab_size())
        self._loads = itertools.count()
        self._stamp(version)
        self._torn: str = ""
        """Why the weights mean nothing since a load that broke off, or ""."""
        self._finished: list[GenerationResult] = []
        """Requests that finished while `score` stepped the engine."""
        model = None if ranks else self._model()
        self._quantized: QuantizedLayers | None = None
        self.sealed: frozenset[str] = frozenset()
        if model is not None and settings.quantize != "none":
            self._quantized = QuantizedLayers(model, settings.quantize, self._engine.model_config.dtype)
            self.sealed = self._quantized.names
        self._places = None if model is None else Places(model, self.sealed)
        self._routing = RoutingRecorder(self._engine, self._outputs) if settings.keep_routing else None

    def add(self, requests: Sequence[GenerationRequest]) -> dict[str, str]:
        refused: dict[str, str] = {}
        for request in requests:
            try:
                self._enqueue(request.id, request.prompt_token_ids, self._params(request), salt=self._salt)
                if self._routing:
                    self._routing.expect(request.id, len(request.prompt_token_ids))
                if request.sampling.stop_strings:
                    self._outputs.watch(request.id, lambda request=request: self._watcher(request))
            except self._refusals as error:
                refused[request.id] = str(error)
                self._left(request.id)
        return refused

    def step(self) -> list[GenerationResult]:
        self._refuse_torn()
        finished, self._finished = self._finished, []
        if self._engine.has_unfinished_requests():
            finished += [self._result(each.id, each.rows) for each in self._step()]
        return finished

    def cut(self, ids: Iterable[str]) -> list[GenerationResult]:
        wanted = list(ids)
        results = [result for result in self._finished if result.id in wanted]
        self._finished = [result for result in self._finished if result.id not in wanted]
        if self._routing:
            for id in wanted:
                self._routing.hold(id)
        return results + [self._result(id, rows) for id in wanted if (rows := self._outputs.end(id))]

    def num_unfinished(self) -> int:
        return self._engine.get_num_unfinished_requests() + len(self._finished)

    def keeps_apart(self, weights: Mapping[str, Any] | None) -> bool:
        return self.versions_held > 1 and bool(weights) and all(map(is_adapter, weights))

    def has_room(self) -> bool:
        return self._slots is not None and self._slots.spare() is not None

    def load_beside(self, weights: Mapping[str, Any], version: PolicyVersion) -> None:
        if self._slots is None:
            raise PolicyError(f"{version} cannot stand beside what is served: the engine was built without adapters.")
        self._refuse_misfits(weights, version)
        self._slots.write_beside(weights, version)
        self._stamp(version)

    def load(self, weights: Mapping[str, Any] | None, version: PolicyVersion, *, keep_kv: bool = True) -> int:
        if self._ranks is None:
            weights = self.prepare(weights or {}, version)
        try:
            self._write(weights, version)
        except Exception as error:
            self._torn = f"the load of {version} broke off ({error})"
            raise
        self._torn = ""
        num_dropped = 0 if keep_kv else self._inside.drop_kv()
        self._stamp(version)
        self._inside.salt_anew(self._salt)
        return num_dropped

    def prepare(self, weights: Mapping[str, Any], version: PolicyVersion) -> Mapping[str, Any]:
        self._refuse_misfits(weights, version)
        if self._quantized is None or any(isinstance(each, Quantized) for each in weights.values()):
            return weights
        layers, others = self._quantized.prepare(weights, version, self.version)
        return layers | others

    def _write(self, weights: Mapping[str, Any] | None, version: PolicyVersion) -> None:
        if self._ranks is not None:
            self._ranks.load()
            return
        whole, adapter = adapters_of(weights or {})
        layers = {path: each for path, each in whole.items() if isinstance(each, Quantized)}
        if self._quantized is not None:
            self._quantized.write(layers)
        if self._places is not None:
            self._places.write({name: each for name, each in whole.items() if name not in layers})
        if self._slots:
            self._slots.write(adapter, version)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        names = list(names)
        if self._ranks is not None:
            yield from self._ranks.read(names)
            return
        if self._slots:
            yield from self._slots.read(names)
            names = [name for name in names if not is_adapter(name)]
        if self._places is not None:
            yield from self._places.read(names)

    def first_wrong(self, names: Iterable[str]) -> str:
        return "" if self._quantized is None else self._quantized.first_wrong(names)

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        self._refuse_torn()
        params = self._params_class(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False)
        # A salt of its own: log-probabilities of a prompt are only given for what is computed, not for cached blocks.
        scheduler: Any = self._engine.engine_core.engine_core.scheduler  # pyright: ignore[reportAttributeAccessIssue]
        with alone(scheduler):
            self._enqueue("score", token_ids, params, salt=f"score/{time.monotonic_ns()}")
            scored = self._step_and_score()
            while scored is None and scheduler.running:
                scored = self._step_and_score()
        while scored is None:  # there was no room beside the KV of the others, of which some must end first
            scored = self._step_and_score()
        self._left("score")
        return scored.prompt_logprobs

    def _step_and_score(self) -> Finished | None:
        """The request "score" if this step ends it; what else it ends is kept for `step`."""
        scored: Finished | None = None
        for each in self._step():
            if each.id == "score":
                scored = each
            else:
                self._finished.append(self._result(each.id, each.rows))
        return scored

    def _step(self) -> list[Finished]:
        finished: Any = self._engine.step()  # of `self._outputs`, whatever vLLM says of its own
        return finished

    def occupancy(self) -> Occupancy:
        return self._inside.occupancy()

    def _stamp(self, version: PolicyVersion) -> None:
        """Stamp tokens with a version, and its entries in the prefix cache with a salt that no other load ever has."""
        self.version = version
        self._salt = f"{version}/{next(self._loads)}"
        self._engine.set_weight_version(str(version))

    def _enqueue(self, id: str, token_ids: np.ndarray, params: Any, *, salt: str) -> None:
        prompt: Any = {"prompt_token_ids": token_ids.tolist(), "cache_salt": salt}
        self._engine.add_request(id, prompt, params, lora_request=self._slots.enter(id) if self._slots else None)

    def _left(self, id: str) -> PolicyVersion | None:
        """Forget a request that has ended; the last version that served it, None where that is the engine's own."""
        return self._slots.leave(id) if self._slots else None

    def _refuse_torn(self) -> None:
        """Raise PolicyError while the weights are those of no version."""
        if self._torn:
            raise PolicyError(f"The engine holds parts of two versions, since {self._torn}; start the replica anew.")

    def _refuse_misfits(self, weights: Mapping[str, Any], version: PolicyVersion) -> None:
        """Raise WeightsError for the first tensor that is not as the engine holds it."""
        whole, adapter = adapters_of(weights)
        if adapter and not self._slots:
            raise WeightsError(f"{version} holds adapters, and the engine was built without; give it learner.lora.")
        if self._slots:
            self._slots.check(adapter, version, self.version)
        if self._places is not None:
            plain = {name: each for name, each in whole.items() if not isinstance(each, Quantized)}
            self._places.check(plain, version, self.version)

    def _params(self, request: GenerationRequest) -> Any:
        sampling = request.sampling
        return self._params_class(
            n=request.num_samples,
            seed=request.seed if sampling.temperature > 0 else None,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=False,
            # Those that were left out have a log-probability of -inf, so the likeliest tell which were kept.
            logprobs=min(sampling.top_k + TIED_TOKENS, self._vocab_size) if sampling.records_kept_sets else 0,
            detokenize=False,
            skip_clone=True,  # made for this request alone
        )

    def _watcher(self, request: GenerationRequest) -> StopWatcher:
        """What ends one completion of a request at a stop string."""
        if self._renderer is None:
            self._renderer = HfRenderer(self._folder)
        given = request.prompt_token_ids[len(request.prompt_token_ids) - request.num_given :]
        return StopWatcher(self._renderer.decode, request.sampling.stop_strings, given.tolist())

    def _result(self, id: str, rows: Sequence[Row]) -> GenerationResult:
        """The columns of one request's rows."""
        lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int32)
        logprobs, kept_set = _logprobs(rows, self._vocab_size)
        last = self._left(id)
        routed = self._routing.take(id, lengths.tolist()) if self._routing else None
        return GenerationResult(
            id=id,
            completions=Completions(
                lengths=lengths,
                token_ids=np.array([token for row in rows for token in row.token_ids], dtype=np.int32),
                logprobs=logprobs,
                versions=VersionRuns.of(run for row in rows for run in _runs(row, last)),
                truncated=np.array([row.reason == LENGTH for row in rows]),
                cut=np.array([row.is_cut for row in rows]),
                kept_set=kept_set,
                routed_experts=routed,
            ),
        )

    def _model(self) -> Any:
        return self._engine.collective_rpc(lambda worker: worker.get_model())[0]


def _arguments(model_folder: str, settings: PolicySettings, seed: int, on_cpu: bool) -> dict[str, Any]:
    step_tokens = settings.max_batch_tokens
    if on_cpu:
        # A prompt that is read in chunks makes vLLM turn back its row's random generator, which a CPU's cannot: the
        # engine would die as soon as a step's prompts exceed its tokens. So prompts are read whole, or wait a step.
        step_tokens = max(step_tokens, settings.max_model_tokens)
    return {
        "model": model_folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "enforce_eager": not settings.compile,
        "max_model_len": settings.max_model_tokens,
        "max_num_seqs": settings.max_sequences,
        "max_num_batched_tokens": step_tokens,
        "enable_chunked_prefill": not on_cpu,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "block_size": settings.block_tokens,
        "enable_prefix_caching": settings.prefix_cache,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # what is asked for is bounded by the request's top_k
        # Of vLLM's kernels on a GPU the one that keeps experts as plain matrices, to be loaded and read back.
        "moe_backend": "auto" if on_cpu else "triton",
        "disable_log_stats": True,
        "seed": seed,
    }


def _logprobs(rows: Sequence[Row], vocab_size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """float32 [T], log-probabilities of the tokens, and int32 [T, K], kept sets where the likeliest were asked for."""
    logprobs = np.array([logprob for row in rows for logprob in row.logprobs], dtype=np.float32)
    num_likeliest = rows[0].num_likeliest
    if not num_likeliest:
        return logprobs, None
    nothing = np.zeros((0, 1 + num_likeliest))
    ids, theirs = (
        np.concatenate([nothing.astype(dtype), *(each[column] for row in rows for each in row.likeliest)])
        for column, dtype in enumerate((np.int32, np.float32))
    )
    return logprobs, kept_sets.from_logprobs(ids[:, 1:], theirs[:, 1:], is_whole=num_likeliest == vocab_size)


_parsed = functools.lru_cache(maxsize=64)(PolicyVersion.parse)
"""Most rows of a step name the same versions."""


def _runs(row: Row, last: PolicyVersion | None) -> Iterator[tuple[int, int, int]]:
    """(tokens, step, incarnation) of each version; `last`: the newest that served the row, later ones did not."""
    for label, num_tokens in row.versions():
        version = _parsed(label)
        version = version if last is None else min(version, last)
        yield num_tokens, version.step, version.incarnation
