"""How the compiled kernels come about, and what happens where they cannot."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = (
    "import logging, torch; logging.basicConfig()\n"
    "from kernels import table\n"
    "cpu = torch.device('cpu')\n"
    "print(type(table.attention_backend(cpu, torch.float32)).__name__, table.pointwise(cpu, torch.float32).__name__)\n"
    "print(table.matrix(torch.eye(3), None)(torch.ones(2, 3)).tolist())\n"
)


def show(directory: Path, path: str) -> subprocess.CompletedProcess[str]:
    """Which kernels a process of its own chooses, with this ``PATH`` and cache."""
    environment = {"PATH": path, "XDG_CACHE_HOME": str(directory / "cache"), "HOME": str(directory)}
    return subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True, timeout=200
    )


def test_they_are_compiled_once(tmp_path: Path) -> None:
    for _ in range(2):
        done = show(tmp_path, os.environ["PATH"])
        assert done.stdout.splitlines()[0] == "NativeAttention kernels.native.pointwise"
        assert done.stdout.splitlines()[1] == str([[1.0] * 3] * 2)
        (made,) = (tmp_path / "cache" / "crosskv" / "kernels").iterdir()
        written = made.stat().st_mtime_ns
    assert made.stat().st_mtime_ns == written


def test_a_machine_without_a_compiler_says_so_and_works(tmp_path: Path) -> None:
    done = show(tmp_path, str(tmp_path))
    assert done.stdout.splitlines() == ["GatherAttention kernels.pointwise", str([[1.0] * 3] * 2)]
    assert done.stderr.count("slower without compiled kernels: there is no C++ compiler on PATH") == 1


@pytest.mark.parametrize(
    "script", ["exit 1", 'case "${@: -1}" in *.so) echo \'not a library\' > "${@: -1}";; esac'], ids=["fails", "lies"]
)
def test_a_broken_compiler_is_no_worse_than_none(tmp_path: Path, script: str) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/bash\n{script}\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
    done = show(tmp_path, f"{tmp_path}:/usr/bin:/bin")
    assert done.stdout.splitlines()[0] == "GatherAttention kernels.pointwise"
    assert "slower without compiled kernels" in done.stderr
