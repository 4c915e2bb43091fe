from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.text.stop_strings import StopStringMatcher

# Two letters make overlaps, borders and near misses common.
texts = st.text(alphabet="ab", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[str, str] | None:
    """The definition: the stop string that ends first, the longest of those that end there; and the text before it."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return longest, text[: end - len(longest)]
    return None


@settings(max_examples=500)
@given(texts, stop_lists, st.lists(st.integers(0, 24)), st.booleans())
@example("aab", ["ab", "b"], [1, 2], False)  # both end together, the longer one counts
@example("aab", ["b", "ab"], [1, 2], False)
@example("abaab", ["abab", "ba"], [], False)  # the one that begins later ends first
def test_equals_a_search_of_the_whole_text_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopStringMatcher(stops, include_in_output=include)
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    shown = "".join(matcher.push(text[a:b]) for a, b in pairwise(bounds)) + matcher.finish()
    expected = first_stop(text, stops)
    if expected is None:
        assert matcher.matched is None
        assert shown == text
    else:
        stop, before = expected
        assert matcher.matched == stop
        assert shown == (before + stop if include else before)


@given(texts, stop_lists)
def test_holds_back_exactly_what_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    shown = ""
    for position, character in enumerate(text):
        shown += matcher.push(character)
        if matcher.matched is not None:
            return
        seen = text[: position + 1]
        starts = [k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k])]
        assert shown == seen[: len(seen) - max(starts)]


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopStringMatcher(["STOP"])
    assert matcher.push("one STOP two") == "one "
    assert (matcher.push(" three"), matcher.finish(), matcher.matched) == ("", "", "STOP")


def test_an_empty_stop_string_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        StopStringMatcher(["a", ""])
