"""One choice's output: its text is that of its tokens up to the stop, however they arrive, and tokens go with their text."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.pipeline import OutputStream
from server.text.tokenizer import load_tokenizer
from tests.unit.text.test_stop import searched
from tests.unit.text.tokenizers_of import BYTE_KEYS, write_gguf

PROPERTY = settings(derandomize=True, deadline=None, max_examples=300)
END = 2


@dataclass
class Given:
    """Logprobs as the engine sends them."""

    logprob: float
    top: tuple = ()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("byte") / "m.gguf", BYTE_KEYS))


@pytest.fixture(scope="module")
def ids(tokenizer):
    return lambda text: tokenizer.encode(text, add_special=False, parse_special=False)


def run(stream, batches, finish="length"):
    """Push batches, the last with `finish`; return all deltas."""
    deltas = [stream.push(batch) for batch in batches[:-1]]
    return [*deltas, stream.push(batches[-1] if batches else [], finish=finish)]


def joined(deltas):
    return "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.tokens]


def test_text_is_that_of_the_tokens_up_to_the_stop(tokenizer):
    letters = [tokenizer.encode(c, add_special=False, parse_special=False)[0] for c in "ab<"]
    batches = st.lists(st.lists(st.sampled_from([*letters, 0, 130, 200]), max_size=4), min_size=1, max_size=8)
    stops = st.lists(st.text("ab<", min_size=1, max_size=3), max_size=3)

    @given(batches, stops, st.booleans())
    @PROPERTY
    def check(batches, stops, include):
        deltas = run(OutputStream(tokenizer, stops=stops, include_stop=include), batches)
        everything = [token for batch in batches for token in batch]
        whole = tokenizer.decode(everything, skip_special=True)
        text, tokens = joined(deltas)
        expected, stopped = searched(whole, stops, include=include)
        assert text == expected
        finishes = [delta.finish for delta in deltas if delta.finish is not None]
        assert finishes == (["stop"] if stopped else ["length"])
        assert [token.token_id for token in tokens] == everything[: len(tokens)]
        assert stopped or len(tokens) == len(everything)

    check()


def test_tokens_come_with_the_text_that_they_stand_for(tokenizer, ids):
    """No delta holds a token whose text is still held back; all offsets lie within the text."""
    stream = OutputStream(tokenizer, stops=["abX"])
    n_text = 0
    for token in ids("ab cabé"):
        delta = stream.push([token])
        n_text += len(delta.text)
        assert all(t.offset + len(t.text.strip("\ufffd")) <= n_text for t in delta.tokens)
    last = stream.push([], finish="length")
    assert last.finish == "length"
    assert n_text + len(last.text) == len("ab cabé")


def test_a_stop_string_takes_its_tokens_with_it(tokenizer, ids):
    delta = OutputStream(tokenizer, stops=["b"]).push(ids("abc"))
    assert (delta.text, [t.text for t in delta.tokens], delta.finish, delta.stop) == ("a", ["a"], "stop", "b")


def test_or_leaves_them_when_it_is_asked_for(tokenizer, ids):
    delta = OutputStream(tokenizer, stops=["b"], include_stop=True).push(ids("abc"))
    assert (delta.text, [t.text for t in delta.tokens]) == ("ab", ["a", "b"])


def test_the_end_token_is_no_output_unless_asked_for(tokenizer, ids):
    hidden = OutputStream(tokenizer).push([*ids("a"), END], finish="stop")
    assert (hidden.text, len(hidden.tokens), hidden.finish, hidden.stop) == ("a", 1, "stop", END)
    shown = OutputStream(tokenizer, include_stop=True, skip_special=False).push([*ids("a"), END], finish="stop")
    assert (shown.text, len(shown.tokens)) == ("a<|im_end|>", 2)


def test_the_end_token_is_counted(tokenizer, ids):
    stream = OutputStream(tokenizer)
    stream.push([*ids("ab"), END], finish="stop")
    assert stream.n_tokens == 3


def test_nothing_comes_after_the_end(tokenizer, ids):
    stream = OutputStream(tokenizer, stops=["b"])
    stream.push(ids("abc"))
    assert stream.finished
    late = stream.push(ids("d"), finish="length")
    assert (late.text, late.tokens, late.finish) == ("", (), None)


def test_an_unfinished_character_shows_at_the_end(tokenizer, ids):
    stream = OutputStream(tokenizer)
    assert stream.push(ids("é")[:1]).text == ""
    last = stream.push([], finish="length")
    assert (last.text, [t.raw for t in last.tokens]) == ("\ufffd", [b"\xc3"])


def test_a_stop_string_may_end_in_what_shows_at_the_end(tokenizer, ids):
    stream = OutputStream(tokenizer, stops=["a\ufffd"])
    stream.push([*ids("a"), ids("é")[0]])
    last = stream.push([], finish="length")
    assert (last.text, last.finish, last.stop) == ("", "stop", "a\ufffd")


def test_so_many_tokens_come_whatever_they_spell(tokenizer, ids):
    stream = OutputStream(tokenizer, stops=["a"], min_tokens=2)
    delta = stream.push(ids("aaba"))
    assert (delta.text, delta.stop) == ("aab", "a")


def test_logprobs_go_with_their_tokens(tokenizer, ids):
    a, b = ids("ab")
    given_ = [Given(-0.5, ((a, -0.5), (END, -1.0))), Given(-0.25)]
    first, second = OutputStream(tokenizer).push([a, b], given_).tokens
    assert (first.logprob, second.logprob, second.top) == (-0.5, -0.25, ())
    assert [(top.token_id, top.text, top.raw, top.logprob) for top in first.top] == [
        (a, "a", b"a", -0.5),
        (END, "<|im_end|>", b"<|im_end|>", -1.0),
    ]
