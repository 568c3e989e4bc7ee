from dataclasses import replace

import pytest

from forge_async.weights.transports import BUILT, RPC, SHM, choose


@pytest.mark.parametrize(
    ("requested", "same_host", "chosen"),
    [
        ("auto", True, SHM),
        ("auto", False, RPC),
        ("shm", True, SHM),
        ("shm", False, RPC),
        ("rpc", True, RPC),
        ("broadcast", True, SHM),
        ("broadcast", False, RPC),
    ],
)
def test_shared_memory_is_for_the_stores_host_and_messages_for_the_others(requested, same_host, chosen):
    assert choose(requested, same_host=same_host) == chosen


@pytest.mark.parametrize("lacking", ["late_joiners", "survives_members"])
def test_auto_leaves_out_what_a_run_cannot_rely_on_however_fast_it_is(lacking):
    fast = replace(SHM, name="fast", cross_host=True, **{lacking: False})
    assert choose("auto", same_host=True, among=(fast, SHM, RPC)) == SHM
    assert choose("auto", same_host=False, among=(fast, SHM, RPC)) == RPC


def test_only_what_crosses_hosts_is_taken_between_them():
    assert {name for name, each in BUILT.items() if not each.suits(same_host=False)} == {"shm"}
