"""Engines with two sets of weights and what a reference computes with them; requests, and what comes of them."""

from __future__ import annotations

import itertools

import numpy as np

from forge_async.core.versions import PolicyVersion
from forge_async.policy.ports import GenerationRequest, Sampling
from tests.fakes import TABLE, FakeEngine, bigram_table, log_softmax
from tests.models import Reference, merge_by_hand, mixed_logprobs, read_weights

PROMPT = (1, 9, 33, 21, 60, 42, 13)
LONG_PROMPT = (1, *((3 * i) % 90 + 4 for i in range(99)))
VERSIONS = itertools.count(1)
"""Steps of versions, since an engine that is shared should see each only once."""


class FakeSubject:
    """The fake engine with two sets of weights."""

    def __init__(self):
        import torch

        self.engine = FakeEngine(max_tokens=128)
        self._tables = [bigram_table(0), bigram_table(1)]
        self.weights = [{TABLE: torch.from_numpy(table)} for table in self._tables]

    def logprobs(self, which, tokens, temperature=1.0):
        rows = log_softmax(self._tables[which][list(tokens[:-1])] / temperature)
        return rows[np.arange(len(tokens) - 1), list(tokens[1:])]

    def logits(self, which, tokens):
        return self._tables[which][list(tokens)]

    def mixed(self, tokens, reads):
        rows, at = [], 0
        for which, count in reads:
            rows.append(self.logprobs(which, tokens)[at : at + count])
            at += count
        return np.concatenate(rows)


class VllmSubject:
    """vLLM with a tiny model, in a process of its own."""

    def __init__(self, child, folders, *, scratch=None, **policy):
        """`scratch`: a new folder, for an engine on two tensor-parallel ranks; `policy`: settings that differ."""
        where = (str(folders[0]),) if scratch is None else (str(folders[0]), str(scratch))
        kind = "vllm_engine" if scratch is None else "vllm_engine_on_two_ranks"
        self.engine = child.build(f"tests.backends:{kind}", *where, **policy)
        self.weights = [read_weights(folder) for folder in folders]
        self._references = [Reference(folder) for folder in folders]

    def logprobs(self, which, tokens, temperature=1.0):
        return self._references[which].logprobs(tokens, temperature)

    def logits(self, which, tokens):
        return self._references[which].logits(tokens)

    def experts(self, which, tokens):
        return self._references[which].experts(tokens)

    def mixed(self, tokens, reads):
        return mixed_logprobs([(self._references[which], count) for which, count in reads], tokens)


class VllmAdapterSubject(VllmSubject):
    """vLLM with two adapters for one model, which is loaded with the first of them; then they travel alone."""

    def __init__(self, child, base, adapters, targets, held=1):
        from forge_async.weights.adapters import read_peft

        self.engine = child.build("tests.backends:vllm_engine", str(base), {"rank": 4, "targets": list(targets)}, held)
        self.base, self.weights = read_weights(base), [read_peft(folder) for folder in adapters]
        merged = [merge_by_hand(folder, folder.with_name(f"{folder.name}-merged")) for folder in adapters]
        self._references = [Reference(folder) for folder in merged]
        self.engine.load(self.base | self.weights[0], PolicyVersion(step=next(VERSIONS)))


def request(
    id="a", prompt=PROMPT, *, n=1, seed=0, tokens=8, temperature=1.0, stop=(), top_p=1.0, top_k=0, texts=(), given=0
):
    return GenerationRequest(
        id=id,
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        num_samples=n,
        num_given=given,
        seed=seed,
        sampling=Sampling(
            max_new_tokens=tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_token_ids=tuple(stop),
            stop_strings=tuple(texts),
        ),
    )


def finish(engine):
    """Step until nothing is left; the completions by request id."""
    found = {}
    while engine.num_unfinished():
        found.update({result.id: result.completions for result in engine.step()})
    return found


def generate(engine, *requests):
    engine.add(list(requests))
    return finish(engine)


def rows(completions, column="token_ids"):
    edges = completions.bounds()
    return [getattr(completions, column)[a:b].tolist() for a, b in zip(edges[:-1], edges[1:], strict=True)]
