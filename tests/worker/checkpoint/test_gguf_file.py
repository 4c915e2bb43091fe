"""GGUF headers that lie: one ``CheckpointError``, no other exception, no allocation of the size that they claim."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.memory import little_memory
from tests.tiny_checkpoints import write_tiny_gguf
from worker.checkpoint.checkpoint import CheckpointError, open_checkpoint
from worker.checkpoint.gguf_file import GgufFile, StringArray

STRING, ARRAY, U32 = 8, 9, 4
EXTREMES = [0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def key(name: bytes, type_: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", type_) + value


def tensor(name: bytes, shape: tuple[int, ...], type_: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_, offset)


def header(keys: int, tensors: int, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


LYING = [
    ("is empty", b""),
    ("truncated", b"GG"),
    ("not a GGUF file", b"PK\x03\x04" + bytes(64)),
    ("version 1", header(0, 0, version=1)),
    ("big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0)),
    ("metadata keys", header(2**40, 0)),
    ("tensors", header(0, 2**60)),
    ("truncated", header(1, 0, struct.pack("<Q", 2**62) + b"name" * 8)),
    ("truncated", header(1, 0, key(b"a", STRING, struct.pack("<Q", 2**63) + b"x"))),
    ("values in an array", header(1, 0, key(b"a", ARRAY, struct.pack("<IQ", U32, 2**61)))),
    ("strings in an array", header(1, 0, key(b"a", ARRAY, struct.pack("<IQ", STRING, 2**61)))),
    ("arrays of arrays", header(1, 0, key(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1)))),
    ("type 77", header(1, 0, key(b"a", 77, bytes(8)))),
    ("occurs twice", header(2, 0, 2 * key(b"a", U32, bytes(4)))),
    ("not UTF-8", header(1, 0, key(b"\xff\xfe", U32, bytes(4)))),
    ("general.alignment", header(1, 0, key(b"general.alignment", U32, struct.pack("<I", 24)))),
    ("9 dimensions", header(0, 1, tensor(b"t", (1,) * 9))),
    ("is empty", header(0, 1, tensor(b"t", (4, 0)))),
    ("quantization type 999", header(0, 1, tensor(b"t", (4,), type_=999) + bytes(64))),
    ("multiple of Q8_0's 32", header(0, 1, tensor(b"t", (33, 2), type_=8) + bytes(256))),
    ("ends at byte", header(0, 1, tensor(b"t", (2**40, 2**40)) + bytes(64))),
    ("ends at byte", header(0, 1, tensor(b"t", (4,), offset=2**63) + bytes(64))),
    ("multiple of 32", header(0, 1, tensor(b"t", (4,), offset=4) + bytes(64))),
    ("occurs twice", header(0, 2, 2 * tensor(b"t", (4,)) + bytes(64))),
    ("overlap", header(0, 2, tensor(b"t", (64,)) + tensor(b"u", (4,), offset=32) + bytes(512))),
]


@pytest.mark.parametrize(("message", "content"), LYING)
def test_a_lie_is_told_in_one_message(tmp_path: Path, message: str, content: bytes) -> None:
    path = tmp_path / "lying.gguf"
    path.write_bytes(content)
    with little_memory(), pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_sound_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "sound.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {"u8": 200, "i8": -3, "u16": 60000, "i16": -5, "u32": 2**31, "i32": -7, "u64": 2**63, "i64": -9}
    writer.add_uint8("u8", values["u8"])
    writer.add_int8("i8", values["i8"])
    writer.add_uint16("u16", values["u16"])
    writer.add_int16("i16", values["i16"])
    writer.add_uint32("u32", values["u32"])
    writer.add_int32("i32", values["i32"])
    writer.add_uint64("u64", values["u64"])
    writer.add_int64("i64", values["i64"])
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 你好")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("strings", ["a", "bb", ""])
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer.add_tensor("weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GgufFile.open(path)
    assert {name: file.metadata[name] for name in values} == values
    assert file.metadata["f64"] == 0.1
    assert file.metadata["yes"] is True
    assert file.metadata["text"] == "naïve 你好"
    assert np.array_equal(np.asarray(file.metadata["numbers"]), [1, 2, 3])
    assert file.metadata["strings"] == StringArray(3)
    assert file.tensors["weight"].shape == (2, 3)
    assert np.array_equal(file.data(file.tensors["weight"]).view(np.float32).reshape(2, 3), weight)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("sound"), "llama", "Q4_1", num_hidden_layers=1)


def open_and_read(path: Path) -> None:
    """All that an engine does with a checkpoint, as far as the file lets it."""
    checkpoint = open_checkpoint(path)
    checkpoint.fingerprint()
    checkpoint.dtype()
    for name in checkpoint.names():
        checkpoint.read_into(name, torch.empty(checkpoint.shape(name)))


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # damaged scales are infinities and NaNs
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_opens_or_is_refused(tmp_path: Path, sound: Path, data: st.DataObject) -> None:
    content = bytearray(sound.read_bytes())
    size = GgufFile.open(sound).header_size
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, size - 1))
        damage = data.draw(
            st.binary(min_size=1, max_size=9)
            | st.sampled_from(EXTREMES).map(lambda extreme: struct.pack("<Q", extreme))
            | st.integers(0, 32).map(lambda type_: struct.pack("<I", type_))
        )
        content[start : start + len(damage)] = damage
    content = content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with little_memory():
        try:
            open_and_read(path)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017 - any outcome but another exception is right


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(max_size=400), keys=st.integers(0, 5), tensors=st.integers(0, 5))
def test_garbage_is_refused(tmp_path: Path, garbage: bytes, keys: int, tensors: int) -> None:
    path = tmp_path / "garbage.gguf"
    path.write_bytes(header(keys, tensors, garbage))
    with little_memory(), pytest.raises(CheckpointError):
        open_checkpoint(path)
