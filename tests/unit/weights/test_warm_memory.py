from forge_async.weights.warm_memory import WarmMemory


def test_memory_is_used_again_when_the_last_view_of_it_is_gone_and_not_before():
    memory = WarmMemory()
    first = memory.take(4096)
    place, view = first.data_ptr(), first[8:].view(-1)
    del first
    assert memory.take(4096).data_ptr() != place
    view.fill_(7)
    del view
    again = [memory.take(4096) for _ in range(2)]
    assert place in [each.data_ptr() for each in again]
    assert len({each.data_ptr() for each in again}) == 2
    assert memory.take(100).numel() == 100


def test_what_lies_below_a_loan_is_one_object_each_time():
    memory = WarmMemory()
    first = memory.lend(4096)
    below = first.below
    first.tensor.fill_(3)
    assert below.unique().tolist() == [3]
    del first
    assert memory.lend(4096).below is below


def test_what_is_discarded_is_not_used_again():
    memory = WarmMemory()
    first = memory.lend(4096)
    below = first.below
    first.discard()
    del first
    assert memory.lend(4096).below is not below
