"""What ``benchmarks.gpu`` would measure on a GPU: small sizes of every case, and a case of every kernel."""

import importlib
import pkgutil

import pytest
import torch

import kernels
from benchmarks.gpu import TOLERANCES, difference
from benchmarks.gpu_case import Place
from benchmarks.gpu_cases import cases
from kernels.launch import Kernel, recorded_launches
from tests.kernels.interpreted.steps import CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_case_gives_what_its_reference_gives(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    differences = {(case.name, case.size): difference(case) for case in cases(Place(CPU, dtype, small=True))}
    assert {case: found for case, found in differences.items() if not found <= TOLERANCES[dtype]} == {}


def test_every_kernel_has_a_case() -> None:
    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(kernels.__path__, "kernels.")]
    declared = {one.name for module in modules for one in vars(module).values() if isinstance(one, Kernel)}
    launched: set[str] = set()
    for case in cases(Place(CPU, torch.float32, small=True)):
        with recorded_launches() as launches:
            case.kernel()
        launched |= {launch.kernel.name for launch in launches}
        assert case.moved > 0
    assert launched == declared
