"""Triton's kernels in processes of their own, because Triton decides once, at import, whether it interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERPRETED = Path(__file__).with_name("interpreted")


def run(*arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # The interpreter's matrices are tiny: threads only wait for each other.
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.parametrize("file", sorted(path.name for path in INTERPRETED.glob("check_*.py")))
def test_kernels_equal_their_references_in_the_interpreter(file: str) -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED / file), interpret=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_compile_for_a_gpu_without_spills() -> None:
    done = run("-m", "kernels.compile", "bf16 (8x128|128, group 4)|latent", interpret=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 do not fit" in done.stdout


def test_nothing_is_called_compiled_in_the_interpreter() -> None:
    done = run("-m", "kernels.compile", interpret=True)
    assert done.returncode == 1
    assert "TRITON_INTERPRET" in done.stderr


def test_an_engine_on_the_cpu_never_imports_triton() -> None:
    script = (
        "import sys, torch\n"
        "sys.modules['triton'] = None\n"  # importing it is an error now
        "import worker.model_runner\n"
        "from kernels.table import attention_backend\n"
        "print(type(attention_backend(torch.device('cpu'))).__name__)\n"
    )
    done = run("-c", script, interpret=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "GatherAttention"
