"""What a recording plays, where what it computes lies, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.native.linear import PackedMatrix
from kernels.native.pointwise import rms_norm, silu_and_multiply
from kernels.native.recording import Arena, CannotRecord, Recording


class Steps:
    """Some kernels one after another, of an input at a place that stays."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.norm = torch.randn(24, generator=generator)
        self.matrix = PackedMatrix(torch.randn(80, 24, generator=generator), None)
        self.back = PackedMatrix(torch.randn(24, 40, generator=generator), None)
        self.input = torch.zeros(rows, 24)

    def __call__(self) -> torch.Tensor:
        """``[rows, 24]``."""
        hidden = self.input
        for _ in range(3):
            hidden = self.back(silu_and_multiply(self.matrix(rms_norm(hidden, self.norm, 1e-5))), hidden)
        return hidden


def test_played_it_computes_what_its_input_holds_by_then() -> None:
    arena = Arena()
    recorded: list[tuple[Steps, Recording, torch.Tensor]] = []
    for rows in (1, 5, 3):
        steps = Steps(rows, seed=rows)
        with Recording(arena) as recording:
            recorded.append((steps, recording, steps()))
        recorded[-1][2].fill_(7.0)
        with Recording(arena):
            steps()
        assert recorded[-1][2].eq(7.0).all(), "nothing is computed before it is played"
    # They share memory, and each is played as if it were alone.
    for seed in range(4):
        for steps, recording, out in recorded:
            steps.input.copy_(torch.randn(steps.input.shape, generator=torch.Generator().manual_seed(seed)))
            recording.play()
            found = out.clone()
            assert torch.equal(found, steps())


@pytest.mark.parametrize(
    ("compute", "culprit"),
    [
        (lambda x: x.add_(1.0), "aten.add_"),
        (lambda x: x.float().sum().item(), "aten.sum"),
        (lambda x: x.T.contiguous(), "aten.clone"),
        (lambda x: torch.zeros(3), "aten.zeros"),
        (lambda x: x.to(torch.bfloat16), "aten._to_copy"),
    ],
)
def test_nothing_but_kernels_may_compute(compute: object, culprit: str) -> None:
    steps = Steps(2, seed=0)
    expected = steps()
    assert callable(compute)
    with pytest.raises(CannotRecord, match=culprit), Recording(Arena()):
        compute(steps())
    assert torch.equal(steps(), expected), "it is over"
    torch.ones(2).add_(1.0)


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90), st.sampled_from([torch.float32, torch.bfloat16]))))
def test_an_arenas_tensors_begin_at_lines_and_do_not_overlap(wanted: list[tuple[int, int, torch.dtype]]) -> None:
    class SmallArena(Arena):
        SLAB = 10_000

    arena = SmallArena()
    addresses: list[list[int]] = []
    for _ in range(2):
        arena.begin()
        tensors = [arena.empty((rows, width), dtype) for rows, width, dtype in wanted]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        for number, (tensor, (rows, width, dtype)) in enumerate(zip(tensors, wanted, strict=True)):
            assert tensor.shape == (rows, width)
            assert tensor.dtype is dtype
            assert tensor.data_ptr() % 64 == 0
            assert (tensor == number).all()
        addresses.append([tensor.data_ptr() for tensor in tensors])
    assert addresses[0] == addresses[1], "the second time it gives out the same"
