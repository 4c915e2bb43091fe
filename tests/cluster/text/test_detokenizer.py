import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from cluster.text.detokenizer import make_detokenizer
from cluster.text.tokenizer import Tokenizer, TokenizerConfig
from tests.cluster.tiny_tokenizer import byte_level_backend

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def streamed(tokenizer: Tokenizer, ids: list[int], *, prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, prompt=prompt or [], skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, TokenizerConfig({}))


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Llama 2's shape: spaces are ▁, one is put before the text, unknown characters fall back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "é", "中", "▁a", "ab", "▁▁", "▁ab"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁"), ("▁a", "b")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    vocab = {piece: index for index, piece in enumerate(["<unk>", "▁", "a", "b", "▁a", "é"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


BYTE_LEVEL = byte_level_backend()
BYTE_LEVEL.add_tokens([AddedToken("<plain added>"), AddedToken("<größer>")])
SENTENCEPIECE = sentencepiece_backend()
WORDPIECE = tokenizers.Tokenizer(
    models.WordPiece(
        {w: i for i, w in enumerate(["[UNK]", "hello", "wor", "##ld", "##s", "é", "!"])}, unk_token="[UNK]"
    )
)
WORDPIECE.decoder = decoders.WordPiece(cleanup=False)
WORDLEVEL = tokenizers.Tokenizer(models.WordLevel({"a": 0, "bc": 1, "é": 2, REPLACEMENT: 3}, unk_token="a"))
SUFFIXED = tokenizers.Tokenizer(models.BPE({"a": 0, "b</w>": 1, "c": 2, "é</w>": 3}, []))
SUFFIXED.decoder = decoders.BPEDecoder()


@given(st.lists(st.integers(0, 503), max_size=40), st.booleans())
def test_any_bytes_are_the_text_that_decoding_at_once_gives(ids: list[int], skip: bool) -> None:
    # Most random sequences are not UTF-8. Decoding at once is done by the tokenizers library.
    expected = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    tokenizer = wrap(BYTE_LEVEL)
    assert "".join(streamed(tokenizer, ids, skip=skip)) == expected
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@given(st.text(max_size=30))
def test_no_piece_splits_a_character(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    pieces = streamed(wrap(BYTE_LEVEL), ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids) == text
    assert not any(REPLACEMENT in piece for piece in pieces) or REPLACEMENT in text


@given(st.text(max_size=20), st.text(max_size=20), st.integers(0, 60))
def test_text_continues_where_the_prompt_ended_even_within_a_character(before: str, after: str, cut: int) -> None:
    ids = BYTE_LEVEL.encode(before + after).ids
    cut = min(cut, len(ids))
    tokenizer = wrap(BYTE_LEVEL)
    head = make_detokenizer(tokenizer)
    prompt_text = "".join(head.push(i) for i in ids[:cut])  # up to the last whole character
    assert prompt_text + "".join(streamed(tokenizer, ids[cut:], prompt=ids[:cut])) == before + after


@given(st.text(alphabet="ab é中😀\n", max_size=30))
def test_sentencepiece_text_round_trips(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    tokenizer = wrap(SENTENCEPIECE)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == SENTENCEPIECE.decode(ids) == text


@given(st.lists(st.integers(0, 267), max_size=40), st.booleans())
def test_sentencepiece_agrees_with_itself_and_with_the_library_on_valid_bytes(ids: list[int], skip: bool) -> None:
    tokenizer = wrap(SENTENCEPIECE)
    text = "".join(streamed(tokenizer, ids, skip=skip))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    expected = SENTENCEPIECE.decode(ids, skip_special_tokens=skip)
    if REPLACEMENT not in expected:  # the library replaces every byte of a run that is broken anywhere
        assert text == expected


@given(st.text(alphabet="ab é中", min_size=1, max_size=20), st.integers(1, 30))
def test_sentencepiece_keeps_the_space_after_a_prompt(text: str, cut: int) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    cut = min(cut, len(ids))
    tokenizer = wrap(SENTENCEPIECE)
    assert tokenizer.decode(ids[:cut]) + "".join(streamed(tokenizer, ids[cut:], prompt=ids[:cut])) == text


@given(st.text(alphabet="ab", max_size=12).map(lambda s: s.replace("b", " b")))
def test_metaspace_text_round_trips(text: str) -> None:
    ids = metaspace_backend().encode(text).ids
    tokenizer = wrap(metaspace_backend())
    assert tokenizer.has_pieces
    assert "".join(streamed(tokenizer, ids)) == metaspace_backend().decode(ids) == text.removeprefix(" ")


@given(st.sampled_from([WORDPIECE, WORDLEVEL, SUFFIXED]), st.lists(st.integers(0, 8), max_size=60))
def test_other_decoders_give_the_text_that_decoding_at_once_gives(
    backend: tokenizers.Tokenizer, ids: list[int]
) -> None:
    tokenizer = wrap(backend)
    assert not tokenizer.has_pieces
    assert "".join(streamed(tokenizer, ids)) == backend.decode(ids)


def test_cost_of_a_token_does_not_depend_on_how_many_came_before() -> None:
    decoded = 0

    class Counting(Tokenizer):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            nonlocal decoded
            decoded += len(token_ids)
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    for ids in ([1, 2, 3] * 1000, [99] * 3000, [3] * 3000):  # words, ids without a text, replacement characters
        decoded = 0
        detokenizer = make_detokenizer(Counting(WORDLEVEL, TokenizerConfig({})))
        for token_id in ids:
            detokenizer.push(token_id)
        assert decoded < 25 * len(ids)
