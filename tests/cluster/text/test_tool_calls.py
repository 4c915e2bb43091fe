"""Tool calls in texts of every style, however the text is cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.text.tool_calls import FORMATS, ToolCallParser, ToolCallStyle, format_of_template

HERMES, LLAMA, MISTRAL = (FORMATS[s] for s in (ToolCallStyle.HERMES, ToolCallStyle.LLAMA3_JSON, ToolCallStyle.MISTRAL))
ARGUMENTS = '{"city": "Zü\\"rich}", "days": [1, {"a": "]"}]}'

# Style, text, content, (name, arguments) of the calls.
CASES = [
    (HERMES, "Just text, 1 < 2.", "Just text, 1 < 2.", []),
    (
        HERMES,
        f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        "",
        [("weather", ARGUMENTS)],
    ),
    (
        HERMES,
        f'Let me see.\n\n<tool_call>{{"name":"a","arguments":{ARGUMENTS}}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"x": 1}, "name": "b"}\n</tool_call> Done.',
        "Let me see. Done.",
        [("a", ARGUMENTS), ("b", '{"x": 1}')],
    ),
    (HERMES, "<tool_call>\nno object\n</tool_call>", "<tool_call>\nno object\n</tool_call>", []),
    (HERMES, '<tool_call>\n{"name": 7}\n</tool_call>', '<tool_call>\n{"name": 7}\n</tool_call>', []),
    (HERMES, '<tool_call>\n{"name": "cut', '<tool_call>\n{"name": "cut', []),
    (HERMES, '<tool_call>\n{"name": "a", "arguments": {"x": "cut', "", [("a", '{"x": "cut')]),
    (HERMES, "almost <tool_cal", "almost <tool_cal", []),
    (LLAMA, f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "", [("weather", ARGUMENTS)]),
    (LLAMA, ' {"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', "", [("a", "{}"), ("b", "{}")]),
    (LLAMA, 'An object: {"name": "a"}', 'An object: {"name": "a"}', []),
    (LLAMA, '{"city": "Bern"}', '{"city": "Bern"}', []),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "a", "arguments": {ARGUMENTS}}}, {{"name": "b", "arguments": {{}}}}]',
        "",
        [("a", ARGUMENTS), ("b", "{}")],
    ),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES, ids=[case[1][:40] for case in CASES])
@given(data=st.data())
def test_calls_are_taken_out_however_the_text_is_cut(style, text, content, calls, data) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parser = ToolCallParser(style)
    parsed = [*(parser.push(piece) for piece in pieces), parser.finish()]
    assert "".join(part.content for part in parsed) == content
    deltas = [call for part in parsed for call in part.calls]
    named = {delta.index: delta.name for delta in deltas if delta.name is not None}
    found = [(named[i], "".join(d.arguments for d in deltas if d.index == i)) for i in range(parser.calls)]
    assert found == calls
    ids = [delta.call_id for delta in deltas if delta.call_id is not None]
    assert len({*ids}) == len(calls)
    assert all(len(call_id) == style.id_length for call_id in ids if style.id_length)


def test_arguments_are_streamed_as_they_come() -> None:
    parser = ToolCallParser(HERMES)
    parts = [parser.push(piece) for piece in ('<tool_call>{"name": "f", "arguments": {"a', '": "b', '"', "}", "}")]
    assert [[call.arguments for call in part.calls] for part in parts] == [["", '{"a'], ['": "b'], ['"'], ["}"], []]
    assert json.loads("".join(call.arguments for part in parts for call in part.calls)) == {"a": "b"}


@pytest.mark.parametrize(
    ("source", "style"),
    [
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>\n</tool_call>{% endif %}", HERMES),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", MISTRAL),
        ('{"name": function name, "parameters": dictionary} {{ tools }} <|eot_id|>', LLAMA),
        ("<tool_call><function=f>", None),
        ("[TOOL_CALLS]f[ARGS]", None),
    ],
)
def test_the_template_shows_the_way(source, style) -> None:
    assert format_of_template(source) == style
