"""The rows that the engine core tells of, token by token, without an engine: what an LLMEngine would call is called."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_async.backends.vllm_outputs import ABORT, LENGTH, STOP, Outputs, Row
from forge_async.core.errors import PolicyError
from forge_async.policy.stop_strings import StopWatcher

STOPPED, LIMITED = "stop", "length"
"""As vLLM's own reasons are when they are put into words."""


class FakeEngine:
    """As much of an LLMEngine as `Outputs` needs."""

    def __init__(self):
        self.output_processor, self.aborted = None, []

    def abort_request(self, ids):
        self.aborted += self.output_processor.abort_requests(ids, False)


def outputs():
    engine = FakeEngine()
    return Outputs(engine), engine


def enter(made, id, num_rows, logprobs=0):
    for index in range(num_rows):
        request = SimpleNamespace(
            request_id=f"{index}_{id}-x", external_req_id=id, sampling_params=SimpleNamespace(logprobs=logprobs)
        )
        made.add_request(request, None, None, index)


def output(row, tokens=(), reason=None, columns=1, prompt=None):
    tokens = list(tokens)
    ids = np.array([[token + column for column in range(columns)] for token in tokens], np.int32).reshape(-1, columns)
    found = SimpleNamespace(logprob_token_ids=ids, logprobs=-ids.astype(np.float32)) if tokens else None
    of_prompt = None if prompt is None else SimpleNamespace(logprobs=torch.tensor(prompt))
    return SimpleNamespace(
        request_id=row,
        new_token_ids=tokens,
        new_logprobs=found,
        new_prompt_logprobs_tensors=of_prompt,
        finish_reason=reason,
    )


def test_a_request_is_told_when_its_last_row_ends_with_the_rows_in_order():
    made, _ = outputs()
    enter(made, "a", 2)
    step = made.process_outputs([output("1_a-x", [5], STOPPED), output("0_a-x", [7])], weight_version="v1")
    assert (step.request_outputs, step.reqs_to_abort) == ([], [])
    assert made.get_num_unfinished_requests() == 1
    (ended,) = made.process_outputs([output("0_a-x", [8], LIMITED)], weight_version="v2").request_outputs
    assert ended.id == "a" and [row.token_ids for row in ended.rows] == [[7, 8], [5]]
    assert [row.logprobs for row in ended.rows] == [[-7, -8], [-5]]
    assert [row.reason for row in ended.rows] == [LENGTH, STOP]
    assert [list(row.versions()) for row in ended.rows] == [[("v1", 1), ("v2", 1)], [("v1", 1)]]
    assert not made.has_unfinished_requests()


@given(st.lists(st.tuples(st.sampled_from(["v1", "v2", "v3"]), st.integers(1, 3)), max_size=8))
def test_every_token_has_the_version_of_the_step_that_made_it(steps):
    made, _ = outputs()
    enter(made, "a", 1)
    for version, count in steps:
        made.process_outputs([output("0_a-x", range(count))], weight_version=version)
    (row,) = made.end("a")
    labels = [label for label, count in row.versions() for _ in range(count)]
    assert labels == [version for version, count in steps for _ in range(count)]
    assert len(list(row.versions())) <= max(len(steps), 0)


def test_tokens_without_a_version_are_an_error():
    made, _ = outputs()
    enter(made, "a", 1)
    made.process_outputs([output("0_a-x", [1])], weight_version=None)
    with pytest.raises(PolicyError, match="without the version"):
        list(made.end("a")[0].versions())


def test_a_request_that_is_ended_gives_what_it_has_and_the_core_hears_of_the_rows_that_ran():
    made, engine = outputs()
    enter(made, "a", 3)
    made.process_outputs([output("1_a-x", [5], STOPPED), output("0_a-x", [7])], weight_version="v")
    rows = made.end("a")
    assert [(row.token_ids, row.reason) for row in rows] == [([7], ABORT), ([5], STOP), ([], ABORT)]
    assert engine.aborted == ["0_a-x", "2_a-x"]
    assert not made.has_unfinished_requests()
    # What the core still tells of them is of nobody.
    assert made.process_outputs([output("0_a-x", [9], STOPPED)], weight_version="v").request_outputs == []
    assert made.end("a") == [] and made.end("never heard of") == []


def test_a_row_that_failed_inside_vllm_is_cut_rather_than_complete():
    """Else what came of it would be scored and trained on as if the model had ended it there."""
    made, _ = outputs()
    enter(made, "a", 3)
    told = [output("0_a-x", [5], STOPPED), output("1_a-x", [6], LIMITED), output("2_a-x", [7], "error")]
    (ended,) = made.process_outputs(told, weight_version="v").request_outputs
    assert [row.is_cut for row in ended.rows] == [False, False, True]
    enter(made, "b", 1)
    assert [row.is_cut for row in made.end("b")] == [True]


def test_a_row_that_completes_a_stop_string_ends_there_and_the_core_is_told():
    made, _ = outputs()
    enter(made, "a", 2)
    made.watch("a", lambda: StopWatcher(lambda ids: "".join(map(chr, ids)), ["ab"]))
    step = made.process_outputs([output("0_a-x", [97]), output("1_a-x", [98])], weight_version="v")
    assert step.reqs_to_abort == []
    step = made.process_outputs([output("0_a-x", [98]), output("1_a-x", [97])], weight_version="v")
    assert step.reqs_to_abort == ["0_a-x"] and step.request_outputs == []
    # By chance the token limit comes with the string: the string is why it ended, and the core knows that it did.
    step = made.process_outputs([output("1_a-x", [98], LIMITED)], weight_version="v")
    assert step.reqs_to_abort == []
    assert [row.reason for row in step.request_outputs[0].rows] == [STOP, STOP]


def test_of_the_likeliest_tokens_as_many_are_kept_as_the_request_asked_for():
    """vLLM's arrays are as wide as the request of a batch that asked for most."""
    made, _ = outputs()
    enter(made, "few", 1, logprobs=1)
    enter(made, "none", 1)
    both = [output("0_few-x", [10], STOPPED, columns=4), output("0_none-x", [20], STOPPED, columns=4)]
    few, none = made.process_outputs(both, weight_version="v").request_outputs
    ((ids, logprobs),) = few.rows[0].likeliest
    assert (ids.tolist(), logprobs.tolist()) == ([[10, 11]], [[-10, -11]])
    assert none.rows[0].likeliest == [] and none.rows[0].logprobs == [-20]


def test_log_probabilities_of_a_prompt_are_laid_together():
    made, _ = outputs()
    enter(made, "score", 1, logprobs=None)
    made.process_outputs([output("0_score-x", prompt=[[-1.0, -9.0], [-2.0, -9.0]])], weight_version="v")
    (scored,) = made.process_outputs(
        [output("0_score-x", [3], LIMITED, prompt=[[-3.0]])], weight_version="v"
    ).request_outputs
    assert scored.prompt_logprobs.tolist() == [-1, -2, -3] and scored.prompt_logprobs.dtype == np.float32


def test_rows_are_added_in_order():
    made, _ = outputs()
    with pytest.raises(AssertionError, match="in order"):
        made.add_request(
            SimpleNamespace(request_id="1_a", external_req_id="a", sampling_params=SimpleNamespace(logprobs=0)),
            None,
            None,
            1,
        )


def test_a_row_that_never_ran_has_no_versions():
    assert list(Row(id="x").versions()) == []
