"""The causal convolution against PyTorch's grouped convolution, in one piece and in many."""

import pytest
import torch
import torch.nn.functional as F

from kernels.causal_conv import convolve_chunk, convolve_row

CHANNELS = 6


def tensors(kernel: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(kernel)
    shapes = ((rows, CHANNELS), (CHANNELS, kernel), (CHANNELS,))
    inputs, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return inputs, weight, bias


def whole(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    padded = F.pad(inputs.t(), (weight.shape[1] - 1, 0))
    return F.conv1d(padded[None], weight[:, None], bias, groups=CHANNELS)[0].t()


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("pieces", [[17], [1, 2, 14], [2] * 8 + [1], [1] * 17])
def test_pieces_give_what_the_whole_gives(kernel: int, pieces: list[int]) -> None:
    inputs, weight, bias = tensors(kernel, sum(pieces))
    state = torch.zeros(CHANNELS, kernel - 1)
    outputs = []
    for piece in inputs.split(pieces):
        output, state = convolve_chunk(piece, state, weight, bias)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs), whole(inputs, weight, bias))
    assert torch.equal(state, inputs[-(kernel - 1) :].t())


def test_a_row_of_each_of_many_sequences() -> None:
    inputs, weight, _ = tensors(4, 4 * 9)
    sequences = inputs.view(4, 9, CHANNELS)
    states = torch.zeros(4, CHANNELS, 3)
    for position in range(9):
        output, states = convolve_row(sequences[:, position], states, weight, None)
        for sequence, got in zip(sequences, output, strict=True):
            torch.testing.assert_close(got, whole(sequence, weight, None)[position])


def test_sums_are_wider_than_the_rows() -> None:
    """In bfloat16 the result is that of float32, rounded once."""
    inputs, weight, bias = (tensor.bfloat16() for tensor in tensors(4, 50))
    expected = whole(inputs.float(), weight.float(), bias.float()).bfloat16()
    state = torch.zeros(CHANNELS, 3, dtype=torch.bfloat16)
    output, last = convolve_chunk(inputs, state, weight, bias)
    assert output.dtype == last.dtype == torch.bfloat16
    assert (output != expected).float().mean() < 0.02
    rows, _ = convolve_row(inputs[:1], state[None], weight, bias)
    assert torch.equal(rows, output[:1])
