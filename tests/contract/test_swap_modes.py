"""What becomes of requests in flight when weights arrive, in each swap mode: the fake engine, and vLLM against a
reference that reads every token with the weights, and on the KV, that the mode promises."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.policy.concurrency import UNLIMITED, ConcurrencyLimit
from forge_async.policy.driver import Driver
from forge_async.policy.swap import MODES, REBUILD, RESUME, RETRY, swap_mode
from forge_async.replay.settings import SWAP_MODES
from tests.engines import LONG_PROMPT, PROMPT, VERSIONS, request
from tests.engines import rows as columns
from tests.fakes import FakeRenderer

pytestmark = pytest.mark.timeout(180)
SHARED = LONG_PROMPT[:90]
"""Almost three blocks of 32 tokens."""


@pytest.fixture
def subject(engine_subject):
    return engine_subject


class Served:
    """A driver on the engine under test, and which weights each version stands for."""

    def __init__(self, subject, mode):
        self.subject, self.mode = subject, swap_mode(mode)
        self.driver = Driver(subject.engine, self.mode, ConcurrencyLimit(UNLIMITED, UNLIMITED))
        self.weights_of = {subject.engine.version.step: 0}
        self.found = {}

    def add(self, *requests):
        self.driver.enqueue(requests)

    def turn(self, count=1):
        for _ in range(count):
            progress = self.driver.turn()
            assert not progress.refused
            self.found |= {result.id: result.completions for result in progress.results}
        return progress

    def pull(self, which, meanwhile=lambda: None, version=None):
        """Pull weights as the mode does it: with the stop around it, two engine steps long."""
        version = version or PolicyVersion(step=next(VERSIONS))
        self.weights_of[version.step] = which
        if self.mode.holds:
            self.driver.hold()
        meanwhile()
        progress = self.turn(2)
        while self.mode.holds and not progress.ready:
            progress = self.turn()
        record = self.driver.swap(self.subject.weights[which], version)
        if self.mode.holds:
            self.driver.release()
        return record

    def finish(self):
        while self.turn().runnable:
            pass
        return self.found

    def rows(self, id, prompt):
        """(tokens after the prompt, log-probabilities, [(weights, number of tokens made by them)]) of each row."""
        completions, edges = self.found[id], self.found[id].bounds().tolist()
        for tokens, logprobs, start, stop in zip(
            columns(completions), columns(completions, "logprobs"), edges[:-1], edges[1:], strict=True
        ):
            runs = completions.versions.slice(start, stop)
            made = [(self.weights_of[step], int(n)) for step, n in zip(runs.steps, runs.lengths, strict=True)]
            assert list(runs.steps) == sorted(set(runs.steps.tolist())), "versions only go up"
            yield [*prompt, *tokens], logprobs, made

    def check(self, id, prompt):
        """Hold the log-probabilities of a request to what its mode promises of them; returns who made its rows."""
        makers = []
        for tokens, logprobs, made in self.rows(id, prompt):
            if self.mode.name == "keep_kv":
                wanted = self.subject.mixed(tokens, reads_of(made, len(prompt)))[len(prompt) - 1 :]
            else:
                wanted = self.fresh(tokens, made, len(prompt))
            assert logprobs == pytest.approx(wanted, abs=1e-4)
            makers.append(made)
        return makers

    def fresh(self, tokens, made, num_prompt):
        """Log-probabilities where each version read all that is before its tokens itself."""
        at, wanted = num_prompt - 1, []
        for which, count in made:
            wanted.append(self.subject.logprobs(which, tokens)[at : at + count])
            at += count
        return np.concatenate(wanted)


def reads_of(made, num_prompt):
    """Who read how many tokens when KV is kept: a token that one version made is read by whoever makes the next."""
    (first, count), *rest = made
    return [(first, num_prompt + count - 1), *rest]


@pytest.fixture(params=MODES)
def served(subject, engine, request):
    assert engine.num_unfinished() == 0
    return Served(subject, request.param)


def test_the_modes_are_those_of_the_dial():
    assert tuple(MODES) == SWAP_MODES


def test_tokens_before_and_after_a_swap_are_of_the_version_and_the_kv_that_the_mode_promises(served):
    served.add(request("a", n=2, tokens=16), request("b", PROMPT[:3], tokens=30))
    served.turn(6)
    record = served.pull(1)
    served.finish()
    old = {"drain": 16, "abort_retry": 0, "blocking": 6}.get(served.mode.name, 8)
    runs = {16: [(0, 16)], 0: [(1, 16)]}.get(old, [(0, old), (1, 16 - old)])
    assert served.check("a", PROMPT) == [runs, runs]
    assert [sum(count for _, count in made) for made in served.check("b", PROMPT[:3])] == [30]
    assert record.mode == served.mode.name
    assert record.pause_s > 0
    drained = served.mode.name == "drain"
    assert record.num_in_flight == (0 if drained else 3)
    assert record.discarded_tokens == (3 * 8 if served.mode.in_flight == RETRY else 0)
    prompts = 2 * len(PROMPT) + 3
    if served.mode.in_flight == RETRY:
        assert record.recomputed_tokens == prompts
    elif served.mode.in_flight in (REBUILD, RESUME):
        # A token that was just sampled has no KV yet; whether it counts is the engine's way of counting.
        assert prompts + 3 * (old - 1) <= record.recomputed_tokens <= prompts + 3 * old
    else:
        assert record.recomputed_tokens == 0


def test_a_swap_keeps_the_kept_set_of_each_token(served):
    served.add(request("a", n=2, tokens=16, top_k=5))
    served.turn(4)
    served.pull(1)
    served.finish()
    assert served.found["a"].kept_set.shape == (32, 5)
    sets = iter(served.found["a"].kept_set.tolist())
    for tokens, _, made in served.rows("a", PROMPT):
        makers = [which for which, count in made for _ in range(count)]
        for at, which in enumerate(makers, start=len(PROMPT)):
            kept = next(sets)
            assert tokens[at] in kept
            if served.mode.name != "keep_kv":  # whose later sets follow from both versions' KV
                logits = served.subject.logits(which, tokens)[at - 1]
                assert sorted(kept) == sorted(np.argsort(-logits)[:5].tolist())


def test_a_stop_string_that_a_swap_falls_into_ends_the_completion(served):
    served.add(request("alone", tokens=16, temperature=0.0))
    (alone,) = columns(served.finish()["alone"])
    text = FakeRenderer().decode(alone[3:7])
    end = next(end for end in range(17) if text in FakeRenderer().decode(alone[:end]))
    served.add(request("a", tokens=16, temperature=0.0, texts=(text,)))
    served.turn(max(end - 3, 0))  # a pull takes two turns more: the swap comes before the last token of the text
    served.pull(0)
    completions = served.finish()["a"]
    assert columns(completions) == [alone[:end]]
    assert (completions.truncated.tolist(), completions.cut.tolist()) == ([False], [False])


def test_three_swaps_in_a_row_with_requests_before_during_and_after_each(served):
    sent = {}

    def send(id):
        prompt = PROMPT[: 2 + len(sent) % 5]
        sent[id] = prompt
        served.add(request(id, prompt, n=2, tokens=14, seed=4096 * len(sent)))

    for number, which in enumerate((1, 0, 1)):
        send(f"before{number}")
        served.turn(3)
        served.pull(which, meanwhile=lambda number=number: send(f"during{number}"))
        send(f"after{number}")
    served.turn(1)
    assert sorted(served.finish()) == sorted(sent)
    for id, prompt in sent.items():
        assert served.found[id].lengths.tolist() == [14, 14]
        assert not served.found[id].cut.any()
        makers = served.check(id, prompt)
        if served.mode.name in ("drain", "abort_retry"):
            assert [len(made) for made in makers] == [1, 1], "samples of one version"
    newest = max(served.weights_of)
    assert served.found["after2"].versions.per_token_steps().tolist() == [newest] * 28


@pytest.mark.stack
@pytest.mark.parametrize("engine_subject", ["vllm"], indirect=True)
def test_a_request_that_waits_inside_the_engine_is_served_by_one_version_alone(served):
    """The engine runs 64 sequences at once; those behind share a prompt whose KV the old version has cached."""
    served.add(
        *(request(f"r{i}", SHARED, n=8, tokens=12, seed=4096 * i) for i in range(8)),
        request("late", SHARED, n=2, tokens=12, seed=77 << 12),
    )
    served.turn(3)
    assert served.driver.state().occupancy.num_waiting == 2
    served.pull(1)
    served.finish()
    for tokens, logprobs, made in served.rows("late", SHARED):
        assert made == [(0 if served.mode.name == "drain" else 1, 12)]
        assert logprobs == pytest.approx(served.fresh(tokens, made, len(SHARED)), abs=1e-4)


def test_blocks_of_mixed_versions_are_found_by_no_request_of_any_version(subject, engine):
    """A running request fills its first block with tokens that two versions read. Then the old version comes back,
    under its own name, and a request begins with exactly these tokens."""
    served, old = Served(subject, "keep_kv"), engine.version
    served.add(request("a", tokens=60))
    served.turn(8)
    served.pull(1)
    served.turn(25)
    (made,) = served.driver.cut(["a"])
    block = (*PROMPT, *made.completions.token_ids.tolist())
    assert len(block) > 32
    for which in (1, 0):
        if which == 0:
            engine.load(subject.weights[0], old)
        served.add(request(f"b{which}", block, tokens=6))
        served.finish()
        for tokens, logprobs, _ in served.rows(f"b{which}", block):
            assert logprobs == pytest.approx(subject.logprobs(which, tokens)[len(block) - 1 :], abs=1e-5)


@pytest.mark.stack
@pytest.mark.parametrize("engine_subject", ["vllm"], indirect=True)
def test_a_sequence_that_was_preempted_before_a_swap_begins_again_on_the_new_weights(subject, engine):
    """64 sequences of different prompts need one KV block more than there are, once they pass 96 tokens."""
    served, before = Served(subject, "keep_kv"), engine.occupancy().num_preemptions
    prompts = {f"r{i}": tuple((7 * i + 3 * k) % 90 + 4 for k in range(80)) for i in range(64)}
    served.add(*(request(id, prompt, tokens=40, seed=4096 * i) for i, (id, prompt) in enumerate(prompts.items())))
    while engine.occupancy().num_preemptions == before:
        assert served.turn().runnable, "the KV cache held them all"
    assert engine.occupancy().num_waiting > 0
    served.pull(1)
    served.finish()
    fresh = 0
    for id, prompt in prompts.items():
        for tokens, logprobs, made in served.rows(id, prompt):
            mixed = subject.mixed(tokens, reads_of(made, len(prompt)))[len(prompt) - 1 :]
            rebuilt = served.fresh(tokens, made, len(prompt))
            is_mixed, is_fresh = (np.abs(logprobs - wanted).max() < 1e-4 for wanted in (mixed, rebuilt))
            assert is_mixed or is_fresh, id
            fresh += is_fresh and not is_mixed
    assert fresh >= 1


def test_what_was_cut_off_goes_on_elsewhere_and_comes_back_whole(subject, engine):
    served = Served(subject, "keep_kv")
    served.add(request("a", n=3, tokens=12), request("b", n=2, tokens=12))
    served.turn(5)
    cut = {result.id: result.completions for result in served.driver.cut(["a", "b"])}
    assert {id: part.cut.tolist() for id, part in cut.items()} == {"a": [True] * 3, "b": [True] * 2}
    served.pull(1)
    served.add(*(dataclasses.replace(request(id, n=len(part.cut), tokens=12), prefix=part) for id, part in cut.items()))
    served.finish()
    for id, part in cut.items():
        whole = served.found[id]
        assert whole.lengths.tolist() == [12] * len(part.cut)
        assert [row[:5] for row in columns(whole)] == columns(part)
        for tokens, logprobs, made in served.rows(id, PROMPT):
            assert made == [(0, 5), (1, 7)]
            assert logprobs == pytest.approx(served.fresh(tokens, made, len(PROMPT)), abs=1e-4)


def test_a_swap_that_is_refused_leaves_everything_as_it_was(served):
    served.add(request("a", n=2, tokens=16))
    served.turn(4)
    weights = {name: tensor[:-1] for name, tensor in served.subject.weights[1].items()}
    if served.mode.holds:
        served.driver.hold()
        while not served.turn().ready:
            pass
    with pytest.raises(WeightsError, match="the engine"):
        served.driver.swap(weights, PolicyVersion(step=next(VERSIONS)))
    served.driver.release()
    served.finish()
    assert served.check("a", PROMPT) == [[(0, 16)]] * 2
