"""Two of our folders carry names that others use as well; importing either must not break the other."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(script: str) -> str:
    """Run in a fresh interpreter that starts in the repository, as ``python -m cluster.cli`` does."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_imports_beside_our_kernels() -> None:
    # A model class pulls in transformers' integration of the other package of that name.
    ours = run(
        "import kernels.pages\n"
        "from transformers import LlamaForCausalLM, LlamaConfig\n"
        "import transformers.integrations.hub_kernels\n"
        "config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,\n"
        "                     num_attention_heads=1, num_key_value_heads=1)\n"
        "LlamaForCausalLM(config)\n"
        "import kernels.attention.gather\n"
        "print(kernels.__file__)"
    )
    assert Path(ours) == ROOT / "kernels" / "__init__.py"


def test_proto_stays_the_package_that_ray_depends_on() -> None:
    found = run("import ray, proto\nassert isinstance(proto.Message, type)\nprint(proto.__file__)")
    assert not Path(found).is_relative_to(ROOT / "proto")
