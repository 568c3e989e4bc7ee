"""What is particular to the filesystem and HTTP transports; what all share is in tests/contract."""

import dataclasses
import json
import socket
import stat
import struct
import time

import pytest
import torch
from safetensors.torch import load_file

from forge_async.backends.filesystem_store import FilesystemStore, prepare_folder
from forge_async.backends.http_store import HttpServer, HttpStore
from forge_async.backends.weight_stores import open_store, start_store
from forge_async.core.errors import ConfigError, WeightsError
from forge_async.weights.settings import WeightsSettings


@pytest.fixture
def folder(tmp_path):
    prepare_folder(tmp_path / "weights")
    return tmp_path / "weights"


async def get(store, key):
    async with store.reading([key]) as [value]:
        return value


async def test_a_blob_is_a_safetensors_file(folder):
    blob = torch.arange(200, dtype=torch.uint8)
    await FilesystemStore(folder).put({"p@0.1/shard/0": blob})
    assert torch.equal(load_file(folder / "p@0.1" / "shard" / "0.safetensors")["blob"], blob)


async def test_a_file_that_is_not_whole_has_no_key(folder):
    (folder / ".partial-1234").write_bytes(b"half")
    store = FilesystemStore(folder)
    assert await store.keys() == []
    await store.put({"a/b": 1})
    assert await store.keys() == ["a/b"]
    await store.delete("")
    assert not (folder / "a").exists()


async def test_a_blob_cut_short_on_disk_is_told(folder):
    store = FilesystemStore(folder)
    await store.put({"a": torch.zeros(1000, dtype=torch.uint8)})
    path = folder / "a.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    assert (await get(store, "a")).numel() == 500 - 128


def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="holds other files"):
        prepare_folder(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


def test_what_an_earlier_run_left_in_our_folder_is_swept(folder):
    (folder / "old.safetensors").write_bytes(b"old")
    prepare_folder(folder)
    assert not (folder / "old.safetensors").exists()


async def test_a_folder_that_cannot_be_written_is_named(folder):
    (folder / "a").write_bytes(b"a file where a folder should be")
    with pytest.raises(WeightsError, match="cannot be written .* move weights.folder"):
        await FilesystemStore(folder).put({"a/b": 1})
    assert [path.name for path in folder.iterdir() if path.name.startswith(".partial")] == []
    assert stat.S_ISREG((folder / "a").stat().st_mode)


@pytest.fixture
def server():
    server = HttpServer("127.0.0.1")
    yield server
    server.close()


@pytest.mark.parametrize("method", ["put", "get", "delete", "keys"])
async def test_without_the_token_nothing_is_told_or_changed(server, method):
    friend = HttpStore(server.address)
    await friend.put({"a": torch.ones(10, dtype=torch.uint8)})
    stranger = HttpStore(dataclasses.replace(server.address, token="guess"))
    calls = {
        "put": lambda: stranger.put({"a": torch.zeros(10, dtype=torch.uint8)}),
        "get": lambda: get(stranger, "a"),
        "delete": lambda: stranger.delete(""),
        "keys": stranger.keys,
    }
    with pytest.raises(WeightsError, match="401"):
        await calls[method]()
    assert torch.equal(await get(friend, "a"), torch.ones(10, dtype=torch.uint8))


async def test_a_writer_that_dies_in_the_middle_stores_nothing(server):
    address = server.address
    with socket.create_connection((address.host, address.port)) as raw:
        head = f"PUT /a HTTP/1.1\r\nAuthorization: Bearer {address.token}\r\nContent-Length: 1000\r\n\r\n"
        raw.sendall(head.encode() + b"x" * 500)
    store = HttpStore(address)
    await store.put({"b": 1})
    assert await store.keys() == ["b"]


async def test_a_store_that_has_ended_is_named():
    server = HttpServer("127.0.0.1")
    store = HttpStore(server.address, timeout_s=5)
    await store.put({"a": 1})
    server.close()
    with pytest.raises(WeightsError, match=r"http://127.0.0.1:\d+ does not answer"):
        await get(store, "a")


async def test_objects_from_the_wire_cannot_name_what_is_not_ours(server):
    address = server.address
    store = HttpStore(address)
    with socket.create_connection((address.host, address.port)) as raw:
        body = b"cos\nsystem\n(S'true'\ntR."
        head = f"PUT /a HTTP/1.1\r\nAuthorization: Bearer {address.token}\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        raw.recv(100)
    with pytest.raises(WeightsError, match="it names os.system"):
        await get(store, "a")
    assert json.dumps(await store.keys()) == '["a"]'


def test_a_client_that_hangs_up_leaves_no_word_on_the_terminal(server, capfd):
    address = server.address
    with socket.create_connection((address.host, address.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # hang up with a reset
        client.sendall(b"PUT /half HTTP/1.1\r\n")
        time.sleep(0.1)  # the server's thread has begun to read
    time.sleep(0.2)  # and would have complained by now: there is nothing to wait for when it keeps silent
    assert capfd.readouterr().err == ""


async def test_a_store_of_files_that_takes_the_place_of_a_dead_one_has_nothing_of_it(tmp_path):
    settings = WeightsSettings(transport="filesystem")
    first = await start_store(settings, str(tmp_path / "weights"))
    old = open_store(first.handle)
    await old.put({"v1/shard/0": torch.ones(4, dtype=torch.uint8)})
    second = await start_store(settings, str(tmp_path / "weights"))
    new = open_store(second.handle)
    assert await new.keys() == []
    await old.put({"v2/shard/0": torch.ones(4, dtype=torch.uint8)})  # was under way when its store died
    assert await new.keys() == []
    await new.put({"v2/shard/0": torch.zeros(4, dtype=torch.uint8)})
    async with new.reading(["v2/shard/0"]) as [value]:
        assert value.tolist() == [0] * 4
    second.close()
    assert not (tmp_path / "weights").exists(), "what the old one wrote goes too"
