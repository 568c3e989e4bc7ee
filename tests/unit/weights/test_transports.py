from dataclasses import replace

import pytest

from forge_async.core.errors import ConfigError
from forge_async.weights.settings import TRANSPORTS
from forge_async.weights.transports import BUILT, IPC, RDMA, RPC, SHM, choose


@pytest.mark.parametrize(
    ("requested", "same_host", "chosen"),
    [
        ("auto", True, SHM),
        ("auto", False, RPC),
        ("shm", True, SHM),
        ("shm", False, RPC),
        ("rpc", True, RPC),
        ("rdma", True, RDMA),
        ("rdma", False, RDMA),
        ("ipc", True, IPC),
        ("broadcast", True, SHM),
        ("broadcast", False, RPC),
    ],
)
def test_shared_memory_is_for_the_stores_host_and_others_get_what_they_ask_for_or_messages(
    requested, same_host, chosen
):
    assert choose(requested, same_host=same_host) == chosen


@pytest.mark.parametrize("lacking", ["late_joiners", "survives_members"])
def test_auto_leaves_out_what_a_run_cannot_rely_on_however_fast_it_is(lacking):
    fast = replace(SHM, name="fast", cross_host=True, **{lacking: False})
    assert choose("auto", same_host=True, among=(fast, SHM, RPC)) == SHM
    assert choose("auto", same_host=False, among=(fast, SHM, RPC)) == RPC


def test_only_what_crosses_hosts_is_taken_between_them():
    assert {name for name, each in BUILT.items() if not each.suits(same_host=False)} == {"shm", "ipc"}
    with pytest.raises(ConfigError, match=r"weights\.transport=ipc .* another; use weights\.transport=auto"):
        choose("ipc", same_host=False)


def test_every_word_of_the_dial_is_a_transport_that_is_built():
    assert {"auto", *BUILT} == set(TRANSPORTS)
