"""The journal file: whole, torn, damaged."""

from __future__ import annotations

import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.errors import ConfigError, ForgeError
from forge_async.core.records import PromptId
from forge_async.replay import events as ev
from forge_async.replay.journal import Journal

PROMPT = PromptId(source='a:"ü\\b', epoch=1, index=2)
ALL_KINDS = [
    ev.Admitted(index=0, prompt_id=PROMPT, num_tokens=7, fresh=True),
    ev.BoundSet(max_staleness=3),
    ev.Started(index=0, replica="r", step=0),
    ev.Requeued(index=0, reason="too_old"),
    ev.Ready(index=0, num_tokens=9, oldest_step=0),
    ev.Discarded(index=0, reason="old"),
    ev.Ended(index=0, outcome="filtered", reason="zero_variance"),
    ev.Taken(step=0, indices=(0, 1)),
    ev.Trained(step=0),
    ev.Published(step=1),
    ev.ReplicaJoined(replica="r", step=0),
    ev.ReplicaLeft(replica="r", made=(0, 2)),
    ev.Pulled(replica="r", step=1),
    ev.Restored(step=1, incarnation=1, num_attempts=3, failed_tries=((4, 1), (6, 2))),
    ev.Closed(reason="done"),
]


def test_every_kind_of_event_survives_the_file(tmp_path) -> None:
    path = tmp_path / "journal" / "events.jsonl"
    journal = Journal.open(path)
    journal.append(ALL_KINDS[:5])
    journal.append([])
    journal.append(ALL_KINDS[5:])
    journal.close()
    journal.close()
    assert list(Journal.read(path)) == ALL_KINDS
    assert {type(event) for event in ALL_KINDS} == set(ev.Event.__args__)


def test_a_line_is_what_other_readers_were_promised() -> None:
    lines = [
        r'"admitted","index":0,"prompt_id":["a:\"\u00fc\\b",1,2],"num_tokens":7,"fresh":true',
        r'"bound_set","max_staleness":3',
        r'"started","index":0,"replica":"r","step":0',
        r'"requeued","index":0,"reason":"too_old"',
        r'"ready","index":0,"num_tokens":9,"oldest_step":0',
        r'"discarded","index":0,"reason":"old"',
        r'"ended","index":0,"outcome":"filtered","reason":"zero_variance"',
        r'"taken","step":0,"indices":[0, 1]',
        r'"trained","step":0',
        r'"published","step":1',
        r'"replica_joined","replica":"r","step":0',
        r'"replica_left","replica":"r","made":[0, 2]',
        r'"pulled","replica":"r","step":1',
        r'"restored","step":1,"incarnation":1,"num_attempts":3,"failed_tries":[[4, 1], [6, 2]],"fresh_lane":false',
        r'"closed","reason":"done"',
    ]
    assert [ev.to_line(event) for event in ALL_KINDS] == ['{"schema":1,"event":' + line + "}" for line in lines]


@given(st.text(), st.text(), st.integers(), st.booleans())
def test_any_text_and_number_is_written_as_json_writes_it(text: str, other: str, number: int, yes: bool) -> None:
    ended = ev.Ended(index=number, outcome=text, reason=other)
    assert ev.to_line(ended) == (
        f'{{"schema":1,"event":"ended","index":{number},"outcome":{json.dumps(text)},"reason":{json.dumps(other)}}}'
    )
    prompt = PromptId(source=text, epoch=number, index=1)
    admitted = ev.Admitted(index=0, prompt_id=prompt, num_tokens=number, fresh=yes)
    assert json.loads(ev.to_line(admitted))["fresh"] is yes
    assert all(ev.from_json(json.loads(ev.to_line(event))) == event for event in (ended, admitted))


def test_a_journal_has_one_writer(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal.open(path)
    with pytest.raises(ForgeError, match="in use by another process"):
        Journal.open(path)
    with pytest.raises(ForgeError, match="in use for 0 s: a process of the run still lives"):
        Journal.wait_until_free(path, 0.0)
    threading.Timer(0.3, journal.close).start()
    Journal.wait_until_free(path, 20.0)
    Journal.open(path).close()
    Journal.wait_until_free(tmp_path / "none", 0.0)


@pytest.mark.parametrize("torn", [b"{", b'{"schema":1,"event":"trained","step":5}', b"\x00\x00\x00\n", b'"\xff'])
def test_a_torn_last_line_is_cut_off(tmp_path, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal.open(path)
    journal.append(ALL_KINDS)
    journal.close()
    with path.open("ab") as file:
        file.write(torn)
    assert list(Journal.read(path)) == ALL_KINDS
    journal = Journal.open(path)
    journal.append([ev.Trained(step=1)])
    journal.close()
    assert list(Journal.read(path)) == [*ALL_KINDS, ev.Trained(step=1)]


def test_a_replica_that_left_before_made_groups_were_told_apart_had_none(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"schema":1,"event":"replica_left","replica":"r"}\n')
    assert list(Journal.read(path)) == [ev.ReplicaLeft(replica="r")]


def test_events_are_read_one_by_one(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join([ev.to_line(ALL_KINDS[0]), "damaged", ev.to_line(ALL_KINDS[1])]) + "\n")
    events = Journal.read(path)
    assert next(events) == ALL_KINDS[0], "what comes later was not looked at yet"
    with pytest.raises(ForgeError, match="line 2"):
        next(events)


def test_damage_in_the_middle_names_file_and_line(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [ev.to_line(event) for event in ALL_KINDS]
    lines[2] = lines[2][:10]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ForgeError, match=r"events\.jsonl, line 3"):
        Journal.open(path)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"schema": 99, "event": "trained", "step": 0}, "schema 99"),
        ({"schema": 1, "event": "exploded"}, "exploded"),
        ({"schema": 1, "event": "trained"}, "wrong or missing"),
        ({"schema": 1, "event": "admitted", "index": 0, "num_tokens": 1, "prompt_id": ["s"]}, "wrong or missing"),
        ([1], "line 1"),
    ],
)
def test_a_whole_line_that_is_no_known_event_is_refused_even_at_the_end(tmp_path, record, words: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(ForgeError, match=words):
        list(Journal.read(path))


@pytest.mark.parametrize(("policy", "num"), [("always", 2), ("step", 1), ("never", 0)])
def test_the_disk_is_synchronised_as_the_policy_says(tmp_path, monkeypatch, policy: str, num: int) -> None:
    journal = Journal.open(tmp_path / "events.jsonl", fsync=policy)
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    journal.append([ev.Published(step=0)])
    journal.append([ev.Published(step=1), ev.Trained(step=0)])
    assert len(calls) == num


def test_an_unknown_policy_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="sometimes"):
        Journal.open(tmp_path / "events.jsonl", fsync="sometimes")
