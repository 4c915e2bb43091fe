import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.text.tokenizer import TextError, Tokenizer, TokenizerError

TEXTS = ["Hello, world!", "", " leading", "中文 😀 façade\n\n\ttabs", "<|im_start|>user\nHi<|im_end|>", "a" * 300]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_equals_transformers(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


def test_reads_what_the_checkpoint_says(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 424
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.config.max_length == 256
    assert tokenizer.config.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert tokenizer.special_ids == {0, 1, 2}


def test_a_training_time_truncation_is_not_applied(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("x " * 100)) > 8


def test_tokens_as_text_for_people(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é😀")
    assert b"".join(tokenizer.piece(i) for i in ids) == "é😀".encode()
    assert tokenizer.token_text(tokenizer.encode("Hello")[0]) == "Hello"
    broken = [tokenizer.token_text(i) for i in ids if tokenizer.token_text(i).startswith("bytes:")]
    assert all(eval(f"b'{text.removeprefix('bytes:')}'") for text in broken)
    assert tokenizer.piece(10_000) == b""
    assert tokenizer.decode([10_000]) == ""


def test_a_lone_surrogate_is_not_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="surrogate"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no tokenizer.json"), ("{", "not a tokenizer"), ("[]", "not a tokenizer")],
)
def test_a_bad_tokenizer_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_directory(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_a_bad_config_file_is_named(tmp_path: Path, checkpoint: Path, content: str) -> None:
    shutil.copy(checkpoint / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"config\.json is not"):
        Tokenizer.from_directory(tmp_path)


def test_the_chat_template_is_found_wherever_checkpoints_have_it(tmp_path: Path, checkpoint: Path) -> None:
    shutil.copy(checkpoint / "tokenizer.json", tmp_path)
    assert Tokenizer.from_directory(tmp_path).config.chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "third"}))
    assert Tokenizer.from_directory(tmp_path).config.chat_template == "third"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "second"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_directory(tmp_path).config.chat_template == "second"
    (tmp_path / "chat_template.jinja").write_text("first")
    assert Tokenizer.from_directory(tmp_path).config.chat_template == "first"
