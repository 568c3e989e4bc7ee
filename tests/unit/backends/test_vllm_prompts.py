"""Rows with the same prompt: who computes it, who waits, who copies."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge_async.backends.vllm_prompts import Families

PROMPT = [1, 5, 9, 7]


@dataclass
class Row:
    """What vLLM's request tells of itself."""

    request_id: str
    prompt_token_ids: list[int] = field(default_factory=lambda: list(PROMPT))
    cache_salt: str = "v1/0"
    num_computed_tokens: int = 0
    ended: bool = False

    @property
    def num_prompt_tokens(self):
        return len(self.prompt_token_ids)

    def is_finished(self):
        return self.ended


def waiting(*rows):
    families = Families()
    for row in rows:
        families.came(row)
    return families, rows


def is_empty(families):
    return not families._by_prompt and not families._of


def test_the_first_computes_the_others_copy_all_but_the_last_token():
    families, (first, second, third) = waiting(Row("a"), Row("b"), Row("c"))
    assert families.num_shared(first, 0) == 0
    assert families.entered(first) is None
    assert families.num_shared(second, 0) == 3, "in the same step"
    assert families.entered(second) is first
    families.planned()
    first.num_computed_tokens = 5
    assert families.num_shared(third, 2) == 1, "later, and a cached block holds two of its tokens"
    assert families.entered(third) is first
    assert is_empty(families)


def test_rows_with_other_prompts_or_salts_have_nothing_to_do_with_each_other():
    families, rows = waiting(Row("a"), Row("b", [1, 5, 9, 8]), Row("c", cache_salt="v2/1"))
    for row in rows:
        assert families.num_shared(row, 0) == 0
        assert families.entered(row) is None
    assert is_empty(families)


def test_a_load_has_those_that_wait_begin_with_a_leader_of_their_own():
    families, (first, second, third) = waiting(Row("a"), Row("b"), Row("c"))
    families.entered(first)
    families.planned()
    first.num_computed_tokens, first.cache_salt = 4, "v2/1/a"
    second.cache_salt = third.cache_salt = "v2/1"
    assert families.num_shared(second, 0) == 0
    assert families.entered(second) is None
    assert families.num_shared(third, 0) == 3
    assert families.entered(third) is second
    assert is_empty(families)


def test_where_the_leader_has_ended_the_next_one_leads():
    families, (first, second, third) = waiting(Row("a"), Row("b"), Row("c"))
    families.entered(first)
    families.planned()
    first.num_computed_tokens, first.ended = 4, True
    families.left(first)
    assert families.num_shared(second, 0) == 0
    assert families.entered(second) is None
    assert families.entered(third) is second


def test_where_the_leader_has_lost_its_kv_the_next_one_leads():
    families, (first, second, third) = waiting(Row("a"), Row("b"), Row("c"))
    families.entered(first)
    families.planned()
    first.num_computed_tokens = 0  # it was preempted
    assert families.num_shared(first, 0) == 0
    assert families.entered(first) is None, "a row that enters again computes what it lost"
    assert families.num_shared(second, 0) == 0
    assert families.entered(second) is None
    assert families.entered(third) is second


def test_rows_that_end_before_they_enter_are_forgotten():
    families, (first, second) = waiting(Row("a"), Row("b"))
    families.left(second)
    families.left(first)
    assert is_empty(families)
    assert families.num_shared(Row("x"), 0) == 0, "and one that never came computes its prompt"
