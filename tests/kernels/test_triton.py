"""Triton's kernels in processes of their own, because Triton decides once, at import, whether it interprets."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Every kernel once; the whole table takes minutes.
PATTERN = "|".join(
    (
        "(write|transfer) bf16 8x128",
        "attention bf16 128, group 4",
        "^latents bf16",
        "pointwise bf16 4096",
        "experts bf16, 8 ",
        "index bf16",
        "draws",
        "delta rule",
    )
)
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


def test_the_table_chooses_by_device() -> None:
    """A GPU that is there is pretended; nothing is launched."""
    script = (
        "import torch\n"
        "from kernels import table\n"
        "def name(chosen):\n"
        "    if type(chosen).__module__ != 'builtins':\n"
        "        return type(chosen).__name__\n"
        "    is_function = hasattr(chosen, '__code__')\n"
        "    return f'{chosen.__module__}.{chosen.__name__}' if is_function else chosen.__name__\n"
        "def names(device, dtype=torch.float32):\n"
        "    return map(name, (table.attention_backend(device, dtype), table.token_copies(device),\n"
        "                      table.pointwise(device, dtype), table.routed_experts(device),\n"
        "                      table.delta_rule(device), table.latent_backend(device),\n"
        "                      table.token_draws(device)))\n"
        "print(*names(torch.device('meta')), *names(torch.device('cpu'), torch.float64))\n"
        "torch.version.cuda = '13.0'\n"
        "properties = type('Properties', (), {'major': 9, 'minor': 0, 'multi_processor_count': 132})\n"
        "torch.cuda.get_device_properties = lambda device: properties\n"
        "for capability in ((7, 5), (9, 0)):\n"
        "    torch.cuda.get_device_capability = lambda device: capability\n"
        "    print(*names(torch.device('cuda')))\n"
    )
    done = run("-c", script, interpret=False)
    assert done.returncode == 0, done.stderr
    plain = [
        "GatherAttention",
        "kernels.pages",
        "kernels.pointwise",
        "kernels.experts.routed_experts",
        "kernels.delta_rule",
    ]
    plain += ["kernels.attention.latent", "kernels.sampling.draw_tokens"]
    here, old, new = (line.split() for line in done.stdout.splitlines())
    assert here == plain * 2
    assert old == plain
    assert new == [
        "PagedAttention",
        "kernels.page_copies",
        "kernels.fused_pointwise",
        "GroupedExperts",
        "FusedDeltaRule",
        "PagedLatentAttention",
        "kernels.fused_sampling.draw_tokens",
    ]


def test_kernels_equal_their_references_in_the_interpreter() -> None:
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py", str(INTERPRETED))
    done = run(*arguments, interpret=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_compile_for_a_gpu_without_spills() -> None:
    done = run("-m", "kernels.compile", PATTERN, interpret=False)
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
        "from kernels import table\n"
        "device = torch.device('cpu')\n"
        "print(table.pointwise(device, torch.float32).__name__)\n"
        "table.attention_backend(device, torch.float32), table.matrix(torch.ones(3, 3), None)\n"
    )
    done = run("-c", script, interpret=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("kernels.native.pointwise", "kernels.pointwise")
