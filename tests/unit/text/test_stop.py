"""Stop strings: found where a plain search finds them however the text is cut, and never given away in part."""

from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.stop import StopMatcher

LETTERS = "ab<"  # few, so that stop strings overlap, repeat and nearly occur
PROPERTY = settings(derandomize=True, deadline=None, max_examples=500)
texts = st.lists(st.text(LETTERS, max_size=5), max_size=12)
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4)


def searched(text, stops, *, include):
    """The specification: the first end of any stop string, of several that end there the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def pushed(pieces, stops, *, include):
    """What a matcher sends, piece by piece, and which stop string it names."""
    matcher = StopMatcher(stops, include=include)
    sent, stopped = [], None
    for piece in pieces:
        result = matcher.push(piece)
        sent.append(result.text)
        stopped = stopped or result.stopped
    return [*sent, matcher.flush()], stopped


@given(texts, stop_lists, st.booleans())
@PROPERTY
def test_it_is_the_plain_search_however_the_text_is_cut(pieces, stops, include):
    sent, stopped = pushed(pieces, stops, include=include)
    assert ("".join(sent), stopped) == searched("".join(pieces), stops, include=include)


@given(texts, stop_lists)
@PROPERTY
def test_nothing_is_held_back_without_need(pieces, stops):
    """What is held back begins a stop string: all but that has been sent after each piece."""
    matcher, n_sent, text = StopMatcher(stops), 0, ""
    for piece in pieces:
        result = matcher.push(piece)
        n_sent, text = n_sent + len(result.text), text + piece
        if result.stopped is not None:
            return
        held = text[n_sent:]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_beginning_of_a_stop_string_waits_until_it_is_known_what_it_is():
    matcher = StopMatcher(["</end>"])
    assert matcher.push("a</en").text == "a"
    assert matcher.push("t").text == "</ent"
    assert matcher.push("</end>b").stopped == "</end>"
    assert matcher.push("more").text == ""
    assert matcher.flush() == ""


def test_what_waits_at_the_end_is_text():
    matcher = StopMatcher(["</end>"])
    assert matcher.push("a</e").text == "a"
    assert matcher.flush() == "</e"
    assert matcher.push("nd>").stopped is None


def test_without_stop_strings_everything_goes_through():
    assert StopMatcher([]).push("a").text == "a"
    assert StopMatcher(["", ""]).push("a").text == "a"


def test_a_long_text_takes_linear_time():
    """A search that starts again at each character would take a million steps for each."""
    matcher = StopMatcher(["a" * 1000 + "b"])
    text = "a" * 1_000_000
    assert len(matcher.push(text).text) == len(text) - 1000
    assert matcher.push("b").stopped
