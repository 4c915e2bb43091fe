import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


def test_without_a_gpu_it_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.chdir(tmp_path)
    assert gpu.main() == 2
    out, err = capsys.readouterr()
    assert err == "benchmarks.gpu runs Triton's kernels on a CUDA device, and PyTorch finds none on this machine\n"
    assert not out
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_is_too_old_is_named_with_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    assert "Tesla T4 of compute capability 7.5" in capsys.readouterr().err
