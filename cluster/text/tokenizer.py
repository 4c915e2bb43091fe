"""A checkpoint's tokenizer.

The front end opens one ``Tokenizer`` when it starts and keeps it for its whole life. It is read-only after that, and
its methods may be called from several threads.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from cluster.errors import CrosskvError

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_CONFIG_BYTES = 64 << 20


class TokenizerError(CrosskvError):
    """A tokenizer's file is missing, unreadable or not what its name says."""


class TextError(ValueError):
    """A text or a token id that this tokenizer cannot represent."""


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What a checkpoint says about its tokenizer outside ``tokenizer.json``.

    ``special_tokens`` maps names such as ``bos_token`` to their text. ``max_length`` is in tokens.
    ``chat_template`` is Jinja source.
    """

    special_tokens: dict[str, str]
    eos_token_ids: frozenset[int] = frozenset()
    max_length: int | None = None
    chat_template: str | None = None

    @classmethod
    def from_directory(cls, directory: Path) -> "TokenizerConfig":
        """Read tokenizer_config.json, config.json, generation_config.json and chat_template.*, as far as they exist."""
        tokenizer = _read_json(directory / "tokenizer_config.json")
        model = _read_json(directory / "config.json")
        special_tokens = _read_json(directory / "special_tokens_map.json") | tokenizer
        return cls(
            special_tokens={
                name: text
                for name in _SPECIAL_TOKEN_NAMES
                if (text := _token_text(special_tokens.get(name))) is not None
            },
            eos_token_ids=_token_ids(_read_json(directory / "generation_config.json").get("eos_token_id"))
            | _token_ids(model.get("eos_token_id")),
            max_length=_max_length(model, tokenizer),
            chat_template=_chat_template(directory, tokenizer),
        )


class Tokenizer:
    """Turns text into token ids and token ids into the bytes of their text.

    Decoding goes through bytes where the tokenizer's decoder is a plain concatenation of bytes (byte-level BPE,
    SentencePiece with or without byte fallback), which is what nearly all language models have: then any sequence of
    ids has exactly one text, however it is cut into pieces. ``has_pieces`` is False for the few others.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._pieces: dict[int, bytes] = {}
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "None"}
        self._rule = _PieceRule.of_decoder(decoder)
        self.config = config
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        eos_token = config.special_tokens.get("eos_token")
        eos_id = None if eos_token is None else backend.token_to_id(eos_token)
        self.eos_token_ids = config.eos_token_ids | (frozenset() if eos_id is None else {eos_id})

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Open the tokenizer of a Hugging Face checkpoint directory; raise ``TokenizerError`` naming the file."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{directory} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises bare Exception
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from None
        return cls(backend, TokenizerConfig.from_directory(directory))

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id that has a text."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_pieces(self) -> bool:
        """Whether a text is the concatenation of its tokens' pieces."""
        return self._rule is not None

    @property
    def strips_leading_space(self) -> bool:
        """Whether the first space of a whole text belongs to the tokenizer and not to the text."""
        return self._rule is not None and self._rule.strip_leading

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the text's token ids; raise ``TextError`` for text that is not Unicode (a lone surrogate)."""
        try:
            # Unlike encode(), this lets other threads run; it leaves out the offsets, which nobody needs here.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            raise TextError("the text holds a lone surrogate, which is not a Unicode character") from None
        except Exception as error:  # the binding raises bare Exception, for example for a character without a token
            raise TextError(f"the text cannot be tokenized: {error}") from None
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return a whole sequence's text. Ids without a text are skipped; bytes that are not UTF-8 become U+FFFD."""
        if self._rule is None:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.piece(token_id) for token_id in token_ids if token_id not in skipped)
        if self._rule.strip_leading:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def piece(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that this token stands for, possibly a part of a character; nothing if it has none."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id)
            if token is None:
                return b""
            piece = token.encode() if self._rule is None else self._rule.piece(token)
            self._pieces[token_id] = piece
        return piece

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that is written so, if there is one."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def token_text(self, token_id: int) -> str:
        r"""Return one token as text for a person: bytes that are not UTF-8 by themselves as ``bytes:\xe4\xb8``."""
        piece = self.piece(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


@dataclass(frozen=True, slots=True)
class _PieceRule:
    """How a token of the vocabulary becomes bytes. ``strip_leading`` applies once, at the start of a whole text."""

    byte_level: bool
    byte_fallback: bool
    space: str | None
    strip_leading: bool

    @staticmethod
    def of_decoder(decoder: dict[str, Any]) -> "_PieceRule | None":
        """Return the rule that does what a serialized decoder does, or None if no such rule does."""
        match decoder:
            case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
                return _PieceRule(byte_level=True, byte_fallback=False, space=None, strip_leading=False)
            case {"type": "Metaspace", "replacement": str(space), "prepend_scheme": str(scheme)}:
                return _PieceRule(byte_level=False, byte_fallback=False, space=space, strip_leading=scheme != "never")
            case {"type": "Sequence", "decoders": list(steps)}:
                return _PieceRule._of_sentencepiece(steps)
        return None

    @staticmethod
    def _of_sentencepiece(steps: list[dict[str, Any]]) -> "_PieceRule | None":
        space, byte_fallback, fused, strip_leading = None, False, False, False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": " "} if not (space or fused):
                    space = pattern
                case {"type": "ByteFallback"} if not fused:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fused:
                    strip_leading = start == 1
                case _:
                    return None
        if not fused:
            return None
        return _PieceRule(byte_level=False, byte_fallback=byte_fallback, space=space, strip_leading=strip_leading)

    def piece(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token is spelled in plain characters
                return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token if self.space is None else token.replace(self.space, " ")).encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the other 68 are U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise TokenizerError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return content


def _token_text(value: object) -> str | None:
    """A special token is its text, or an object that has the text under ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _token_ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(i for i in values if isinstance(i, int) and i >= 0)


def _max_length(model: dict[str, Any], tokenizer: dict[str, Any]) -> int | None:
    text_model = model.get("text_config")
    if isinstance(text_model, dict):
        model = text_model | model
    # transformers writes 10^30 where it knows no limit.
    limits = [model.get("max_position_embeddings"), tokenizer.get("model_max_length")]
    return next((limit for limit in limits if isinstance(limit, int) and 0 < limit < 1 << 40), None)


def _chat_template(directory: Path, tokenizer: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except ValueError as error:
            raise TokenizerError(f"{path} is not UTF-8: {error}") from None
    template = tokenizer.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
