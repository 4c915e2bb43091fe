"""One engine's grammars, compiled: each once, in a process that is started for the first and kept.

One thread compiles, never the engine's. The last grammars are kept, up to so many bytes.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import xgrammar

from worker.grammar.compile_process import (
    MAX_SECONDS,
    OK,
    READY,
    encode,
    encode_vocabulary,
    read_frame,
    tokenizer_info,
    write_frame,
)
from worker.grammar.grammar import Grammar, GrammarError
from worker.grammar.vocabulary import Vocabulary

MAX_CACHE_BYTES = 256 << 20
MAX_START_SECONDS = 120
"""Of the process, which imports PyTorch."""
_ROOT = Path(__file__).resolve().parents[2]


class GrammarCompiler:
    """See the module. ``vocab_size`` is the model's, whose last tokens may have no text."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        pieces = vocabulary.pieces[:vocab_size]
        self._pieces = pieces + (b"",) * (vocab_size - len(pieces))
        self._info = tokenizer_info(list(self._pieces))
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, xgrammar.CompiledGrammar] = OrderedDict()
        self._bytes = 0
        self._process: _CompileProcess | None = None

    def kept(self, grammar: Grammar) -> xgrammar.CompiledGrammar | None:
        """The grammar if it has been compiled, from any thread."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """The compiled grammar, kept or new; raises ``GrammarError``."""
        compiled = self.kept(grammar)
        if compiled is None:
            compiled = xgrammar.CompiledGrammar.deserialize_json(self._serialized(grammar), self._info)
            self._keep(grammar, compiled)
        return compiled

    def _keep(self, grammar: Grammar, compiled: xgrammar.CompiledGrammar) -> None:
        with self._lock:
            self._compiled[grammar] = compiled
            self._bytes += compiled.memory_size_bytes
            while self._bytes > MAX_CACHE_BYTES and len(self._compiled) > 1:
                _, oldest = self._compiled.popitem(last=False)
                self._bytes -= oldest.memory_size_bytes

    def close(self) -> None:
        """End the process; from any thread, also while it compiles."""
        if self._process is not None:
            self._process.kill()

    def _serialized(self, grammar: Grammar) -> str:
        if self._process is None or not self._process.alive:
            self._process = _CompileProcess(self._pieces)
        answer = self._process.ask(encode(grammar))
        if answer is None:
            raise GrammarError(
                f"the {grammar.kind} takes more than {MAX_SECONDS} s or too much memory to compile; simplify it"
            )
        text = answer[1:].decode()
        if answer[:1] != OK:
            raise GrammarError(text)
        return text


class _CompileProcess:
    """The process; made when it is ready."""

    def __init__(self, pieces: tuple[bytes, ...]) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "worker.grammar.compile_process"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if self._exchange(encode_vocabulary(pieces), MAX_START_SECONDS) != READY:
            raise RuntimeError(f"the process that compiles grammars did not start: status {self._process.returncode}")

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, frame: bytes) -> bytes | None:
        """The answer; None if it died or was ended over this."""
        return self._exchange(frame, MAX_SECONDS)

    def _exchange(self, frame: bytes, seconds: float) -> bytes | None:
        self._send(frame)
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            answer = read_frame(self._process.stdout)
        finally:
            timer.cancel()
        if answer is None:
            self.kill()
        return answer

    def kill(self) -> None:
        """End it and wait until it has."""
        self._process.kill()
        self._process.wait()

    def _send(self, frame: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, which reading tells
            write_frame(self._process.stdin, frame)
