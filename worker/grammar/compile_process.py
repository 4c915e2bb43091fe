"""Compiles grammars in a process of its own, which can be ended: a grammar may take for ever, or all memory, or crash.

    python -m worker.grammar.compile_process

Started by ``compiler.py`` when the first grammar comes; it ends when its standard input does. Both directions carry
frames: a length in 8 bytes, little-endian, then so many bytes. The first is the vocabulary, and is answered by
``READY``. Every other one is a grammar, and is answered by one that begins with ``OK`` and is the compiled grammar, or
with ``REFUSED`` and says why.
"""

import json
import os
import re
import resource
import signal
import struct
from typing import IO

import xgrammar

from worker.grammar.grammar import Grammar, GrammarError, GrammarKind
from worker.grammar.json_schema import EnforceableSchema, enforceable, schemas_of_tag
from worker.grammar.pattern import check_regex

READY, OK, REFUSED = b"!", b"+", b"-"
MAX_COMPILED_BYTES = 64 << 20
MAX_MEMORY = 1 << 30
"""Bytes that a compilation may take beside what the process has anyway."""
MAX_SECONDS = 10
"""Of one compilation. The process ends itself a little later than it is ended, in case nobody is left to do that."""
_LENGTH = struct.Struct("<Q")
# XGrammar begins with a time and a source line, and ends with a line break.
_ORIGIN = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame, None if there is none."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: IO[bytes], body: bytes) -> None:
    """Write a frame, at once."""
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def encode(grammar: Grammar) -> bytes:
    """A grammar as a frame."""
    return json.dumps([grammar.kind, grammar.text, grammar.compact]).encode()


def encode_vocabulary(pieces: tuple[bytes, ...]) -> bytes:
    """A vocabulary as a frame."""
    return json.dumps([piece.decode("latin-1") for piece in pieces]).encode()


def tokenizer_info(pieces: list[bytes]) -> xgrammar.TokenizerInfo:
    """What XGrammar has to know. Tokens that end a text are no part of it: who follows a grammar adds those."""
    return xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=[])


def compile_grammar(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    """Compile; raises ``GrammarError`` for what is wrong or not supported."""
    grammar.check_size()
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                schema = _checked(enforceable(grammar.text))
                return compiler.compile_json_schema(schema, any_whitespace=not grammar.compact)
            case GrammarKind.REGEX:
                check_regex(grammar.text)
                return compiler.compile_regex(grammar.text)
            case GrammarKind.EBNF:
                return compiler.compile_grammar(grammar.text)
            case GrammarKind.STRUCTURAL_TAG:
                return compiler.compile_structural_tag(_enforceable_tag(grammar.text))
    except RuntimeError as error:
        reason = _ORIGIN.sub("", " ".join(str(error).split()))
        raise GrammarError(f"the {grammar.kind} cannot be used: {reason:.500}") from None


def _enforceable_tag(text: str) -> str:
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the structural tag is not JSON: {error}") from None
    for part in list(schemas_of_tag(tag)):
        part["json_schema"] = json.loads(_checked(enforceable(json.dumps(part["json_schema"]))))
    return json.dumps(tag)


def _checked(schema: EnforceableSchema) -> str:
    """Return the schema's text, unless a pattern would be matched against the JSON text instead of the string.

    XGrammar does so where no string that JSON writes without escapes matches. Raises ``GrammarError``.
    """
    for pattern in schema.patterns:
        if "json_string=true" not in str(xgrammar.Grammar.from_json_schema({"type": "string", "pattern": pattern})):
            raise GrammarError(f"JSON schema: pattern {pattern!r:.100} matches no string that JSON writes as it is")
    return schema.text


def _serialized(compiled: xgrammar.CompiledGrammar) -> bytes:
    size = compiled.memory_size_bytes
    if size > MAX_COMPILED_BYTES:
        raise GrammarError(f"compiled, the grammar takes {size} bytes; at most {MAX_COMPILED_BYTES} are allowed")
    return compiled.serialize_json().encode()


def _limit_memory() -> None:
    with open("/proc/self/status", encoding="ascii") as status:
        own = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (own + MAX_MEMORY, own + MAX_MEMORY))


def main() -> None:
    """Serve until standard input ends."""
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is not ours
    vocabulary = read_frame(incoming)
    if vocabulary is None:
        return
    info = tokenizer_info([piece.encode("latin-1") for piece in json.loads(vocabulary)])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    _limit_memory()
    os.nice(10)  # nobody's tokens wait for it
    write_frame(outgoing, READY)
    while (frame := read_frame(incoming)) is not None:
        kind, text, compact = json.loads(frame)
        signal.alarm(2 * MAX_SECONDS)
        try:
            answer = OK + _serialized(compile_grammar(compiler, Grammar(GrammarKind(kind), text, compact)))
        except GrammarError as error:
            answer = REFUSED + str(error).encode("utf-8", "replace")
        except MemoryError:
            answer = REFUSED + b"the grammar takes too much memory to compile; simplify it"
        signal.alarm(0)
        write_frame(outgoing, answer)


if __name__ == "__main__":
    main()
