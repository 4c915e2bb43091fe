"""What the grammar of tools lets a model write, the parser of that style finds again."""

import json
import random
from typing import Any

import numpy as np
import pytest
import tokenizers
import xgrammar

from cluster.openai.tools import NamedToolChoice, Tool, ToolChoice, tool_grammar
from cluster.text.tokenizer import Tokenizer, TokenizerConfig
from cluster.text.tool_calls import FORMATS, ToolCallParser, ToolCallStyle
from worker.grammar.compile_process import compile_grammar, tokenizer_info
from worker.grammar.vocabulary import SPECIAL_PIECE

OPENING = "[TOOL_CALLS]"
SPECIAL = 256
PARAMETERS = {"type": "object", "properties": {"x": {"enum": [1, "a}", None]}}, "required": ["x"]}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": PARAMETERS}})
    for name in ("first", "second")
]


def bytes_tokenizer(*, special: bool) -> Tokenizer:
    """One that has the opening as a special token, or does not."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({OPENING: SPECIAL, "?": 0}, "?"))
    if special:
        backend.add_special_tokens([OPENING])
    return Tokenizer(backend, TokenizerConfig({}))


def babble(tag: Any, seed: int) -> str:
    """A random text that follows the grammar, byte by byte."""
    compiler = xgrammar.GrammarCompiler(
        tokenizer_info([*(bytes([byte]) for byte in range(256)), SPECIAL_PIECE]), max_threads=1
    )
    matcher = xgrammar.GrammarMatcher(compile_grammar(compiler, tag))
    generator = random.Random(seed)
    text = b""
    for _ in range(2000):
        mask = np.zeros((1, 9), dtype=np.int32)
        matcher.fill_next_token_bitmask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if matcher.is_completed() and (not allowed or generator.random() < 0.5):
            return text.decode()
        # Space is allowed without end.
        token = generator.choice([t for t in allowed if t not in (9, 10, 13, 32)] or allowed)
        assert matcher.accept_token(token)
        text += OPENING.encode() if token == SPECIAL else bytes([token])
    raise AssertionError(f"no end: {text!r}")


@pytest.mark.parametrize("style", FORMATS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("choice", "parallel"),
    [
        ("required", True),
        ("required", False),
        ({"type": "function", "function": {"name": "second"}}, True),
    ],
    ids=str,
)
def test_what_may_be_written_is_found_again(style: ToolCallStyle, special: bool, choice: Any, parallel: bool) -> None:
    wanted: ToolChoice = choice if isinstance(choice, str) else NamedToolChoice.model_validate(choice)
    grammar = tool_grammar(TOOLS, wanted, parallel, FORMATS[style], bytes_tokenizer(special=special))
    counts = set()
    for seed in range(8):
        parser = ToolCallParser(FORMATS[style])
        parts = [*(parser.push(character) for character in babble(grammar, seed)), parser.finish()]
        assert "".join(part.content for part in parts) == ""
        deltas = [call for part in parts for call in part.calls]
        for index in range(parser.calls):
            arguments = json.loads("".join(delta.arguments for delta in deltas if delta.index == index))
            assert arguments["x"] in (1, "a}", None)
        names = {delta.name for delta in deltas if delta.name is not None}
        assert names <= ({"first", "second"} if choice == "required" else {"second"})
        counts.add(parser.calls)
    assert min(counts) == 1
    assert (max(counts) > 1) == (parallel and choice == "required")
