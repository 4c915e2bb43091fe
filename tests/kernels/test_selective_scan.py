"""The selective scan against its recurrence, one token, one channel and one number at a time in float64."""

import math
from dataclasses import dataclass

import pytest
import torch

from kernels.selective_scan import BLOCK, scan_chunk, scan_row

CHANNELS, D_STATE = 5, 3


@dataclass(frozen=True)
class Stream:
    """Some tokens of one sequence after a state, and the channels' constants."""

    state: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor

    def naive(self) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.state.double().tolist()
        outputs = []
        for token, x in enumerate(self.x.double().tolist()):
            row = []
            for channel, value in enumerate(x):
                dt = self.dt[token, channel].item()
                for i in range(D_STATE):
                    kept = math.exp(dt * self.a[channel, i].item()) * state[channel][i]
                    state[channel][i] = kept + dt * value * self.b[token, i].item()
                seen = sum(self.c[token, i].item() * state[channel][i] for i in range(D_STATE))
                row.append(seen + self.d[channel].item() * value)
            outputs.append(row)
        return torch.tensor(outputs), torch.tensor(state)


def make_stream(tokens: int, seed: int, steps: float = 1.0) -> Stream:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Stream(
        state=random(CHANNELS, D_STATE),
        x=random(tokens, CHANNELS),
        dt=steps * torch.nn.functional.softplus(random(tokens, CHANNELS)),
        a=-random(CHANNELS, D_STATE).exp(),
        b=random(tokens, D_STATE),
        c=random(tokens, D_STATE),
        d=random(CHANNELS),
    )


@pytest.mark.parametrize("tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
@pytest.mark.parametrize("steps", [1e-3, 1.0, 100.0])
def test_a_chunk_is_the_recurrence(tokens: int, steps: float) -> None:
    """Steps from nothing forgotten to everything."""
    s = make_stream(tokens, seed=tokens, steps=steps)
    before = s.state.clone()
    out, state = scan_chunk(s.state, s.x, s.dt, s.a, s.b, s.c, s.d)
    expected_out, expected_state = s.naive()
    torch.testing.assert_close(out, expected_out, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(state, expected_state, atol=1e-4, rtol=1e-5)
    assert torch.equal(s.state, before)


@pytest.mark.parametrize("pieces", [[30], [1] * 30, [7, 7, 7, 7, 2]])
def test_a_state_goes_from_piece_to_piece(pieces: list[int]) -> None:
    s = make_stream(30, seed=1)
    state, outputs = s.state, []
    for x, dt, b, c in zip(*(t.split(pieces) for t in (s.x, s.dt, s.b, s.c)), strict=True):
        out, state = scan_chunk(state, x, dt, s.a, b, c, s.d)
        outputs.append(out)
    expected_out, expected_state = s.naive()
    torch.testing.assert_close(torch.cat(outputs), expected_out, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(state, expected_state, atol=1e-4, rtol=1e-5)


def test_rows_of_many_sequences_do_not_mix() -> None:
    streams = [make_stream(6, seed=seed) for seed in range(4)]
    first = streams[0]
    states = torch.stack([s.state for s in streams])
    rows = []
    for t in range(6):
        x, dt, b, c = (torch.stack([getattr(s, name)[t] for s in streams]) for name in ("x", "dt", "b", "c"))
        out, states = scan_row(states, x, dt, first.a, b, c, first.d)
        rows.append(out)
    for i, s in enumerate(streams):
        expected, state = Stream(s.state, s.x, s.dt, first.a, s.b, s.c, first.d).naive()
        torch.testing.assert_close(torch.stack([row[i] for row in rows]), expected, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(states[i], state, atol=1e-4, rtol=1e-5)
