"""Nothing of ours unpickles, or runs what it reads: not from a port, not from a checkpoint."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("cluster", "worker", "kv_transfer", "kernels")
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"}
CALLS = {
    "torch.load",
    "numpy.load",
    "np.load",
    "pandas.read_pickle",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "eval",
    "exec",
    # torch.distributed's way to send any object.
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
ARGUMENTS = {"trust_remote_code", "allow_pickle", "weights_only"}


def findings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names if alias.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield module
            case ast.Call(func):
                name = ast.unparse(func)
                if name in CALLS or name.rsplit(".", 1)[-1] in CALLS - {"eval", "exec", "torch.load"}:
                    yield name
            case ast.keyword(arg=str(name)) if name in ARGUMENTS:
                yield name


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import pickle as harmless",
        "torch.load(path)",
        "torch.distributed.broadcast_object_list(objects)",
        "f(allow_pickle=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "yaml.load(text)",
        "eval(text)",
    ],
)
def test_what_is_looked_for_is_found(source: str) -> None:
    assert list(findings(source))


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_unpickles(room: str) -> None:
    for path in sorted((ROOT / room).rglob("*.py")):
        assert not list(findings(path.read_text())), path
