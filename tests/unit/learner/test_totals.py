"""What a step of several updates reports."""

from forge_async.learner.totals import merge_updates

FIRST = ({"loss/objective": 4.0, "clipped": 2.0, "mismatch_kl": 1.0}, {"logprob_diff": 0.5, "weight": 1.0})
SECOND = ({"loss/objective": 2.0, "clipped": 6.0, "mismatch_kl": 3.0}, {"logprob_diff": 0.7, "weight": 2.0})
THIRD = ({"loss/objective": 1.0, "clipped": 10.0, "mismatch_kl": 50.0}, {"logprob_diff": 9.0, "weight": 5.0})
FOURTH = ({"loss/objective": 1.0, "clipped": 2.0, "mismatch_kl": 70.0}, {"logprob_diff": 9.0, "weight": 3.0})


def test_one_update_is_reported_as_it_is():
    assert merge_updates([FIRST]) == FIRST


def test_updates_on_the_whole_batch_are_averaged_but_for_the_mismatch_at_the_start():
    sums, maxima = merge_updates([FIRST, SECOND])
    assert sums == {"loss/objective": 3.0, "clipped": 4.0, "mismatch_kl": 1.0}
    assert maxima == {"logprob_diff": 0.5, "weight": 2.0}


def test_mini_batches_add_up_to_a_pass_and_their_losses_are_averaged():
    sums, maxima = merge_updates([FIRST, SECOND, THIRD, FOURTH], num_parts=2)
    assert sums == {"loss/objective": 2.0, "clipped": (8.0 + 12.0) / 2, "mismatch_kl": 4.0}
    assert maxima == {"logprob_diff": 0.7, "weight": 5.0}
