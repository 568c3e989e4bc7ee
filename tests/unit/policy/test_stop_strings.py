from forge_async.policy.stop_strings import StopWatcher
from tests.fakes import FakeRenderer

ids = FakeRenderer().encode


def watcher(*strings, given=""):
    return StopWatcher(FakeRenderer().decode, strings, ids(given).tolist())


def test_the_token_that_completes_a_string_is_told():
    watched = watcher("END", "\n\n")
    assert [watched.completed_by([token]) for token in ids("xEN ENDE")] == [None] * 6 + ["END", "END"]


def test_a_string_may_begin_in_what_was_given():
    assert watcher("END", given="12 EN").completed_by(ids("D")) == "END"
    assert watcher("END").completed_by(ids("D")) is None


def test_only_as_much_as_a_string_can_span_is_decoded():
    decoded = []

    def decode(tokens):
        decoded.append(len(tokens))
        return FakeRenderer().decode(tokens)

    watched = StopWatcher(decode, ("ab",), [])
    for token in ids("x" * 500):
        assert watched.completed_by([token]) is None
    assert max(decoded) == 12


def test_a_character_of_several_tokens_completes_a_string_with_its_last():
    watched = StopWatcher(lambda tokens: bytes(tokens).decode(errors="replace"), ("é!",), [])
    assert [watched.completed_by([byte]) for byte in "aé!".encode()] == [None, None, None, "é!"]
