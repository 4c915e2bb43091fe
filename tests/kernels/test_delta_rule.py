"""The gated delta rule in blocks and in batches against the recurrence as it is written, token by token in float64."""

import pytest
import torch

from kernels.delta_rule import BLOCK_ROWS, DeltaRows, delta_rule_chunk, delta_rule_row, unit_vectors

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 8, 5


def random_rows(count: int, seed: int, strength: float = 0.1) -> DeltaRows:
    """``strength`` scales the decays: at 8, a block forgets all that came before it."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(count, KEY_HEADS, KEY_DIM, generator=generator) for _ in range(2))
    return DeltaRows(
        query / KEY_DIM,
        unit_vectors(key),
        torch.randn(count, VALUE_HEADS, VALUE_DIM, generator=generator),
        -strength * torch.rand(count, VALUE_HEADS, generator=generator),
        torch.rand(count, VALUE_HEADS, generator=generator),
    )


def recurrence(rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row and head by head, in float64."""
    state = state.double().clone()
    out = torch.empty(len(rows.value), VALUE_HEADS, VALUE_DIM, dtype=torch.float64)
    query, key, value = rows.query.double(), rows.key.double(), rows.value.double()
    for row in range(len(value)):
        for head in range(VALUE_HEADS):
            key_head = head // (VALUE_HEADS // KEY_HEADS)
            memory = state[head] * rows.log_decay[row, head].double().exp()
            error = value[row, head] - key[row, key_head] @ memory
            state[head] = memory + rows.beta[row, head].double() * torch.outer(key[row, key_head], error)
            out[row, head] = query[row, key_head] @ state[head]
    return out.float(), state.float()


def random_state(*sequences: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(*sequences, VALUE_HEADS, KEY_DIM, VALUE_DIM, generator=generator)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("strength", [0.1, 8.0])
@pytest.mark.parametrize("count", [1, 2, 7, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS + 5])
def test_blocks_give_what_the_recurrence_gives(count: int, strength: float) -> None:
    rows, state = random_rows(count, seed=count, strength=strength), random_state()
    before = state.clone()
    expected, expected_state = recurrence(rows, state)
    out, new_state = delta_rule_chunk(rows, state)
    close(out, expected)
    close(new_state, expected_state)
    assert torch.equal(state, before), "the given state is not touched"


def test_a_state_carries_over_from_piece_to_piece() -> None:
    rows = random_rows(150, seed=1)
    expected, expected_state = recurrence(rows, torch.zeros_like(random_state()))
    state = torch.zeros_like(random_state())
    outputs = []
    for begin, end in ((0, 1), (1, 70), (70, 149), (149, 150)):
        out, state = delta_rule_chunk(rows.at(slice(begin, end)), state)
        outputs.append(out)
    close(torch.cat(outputs), expected)
    close(state, expected_state)


def test_one_row_of_each_of_many_sequences() -> None:
    everything = random_rows(4 * 5, seed=3)
    first = states = random_state(4)
    outputs = []
    for position in range(5):
        # The sequences take turns.
        out, states = delta_rule_row(everything.at(slice(4 * position, 4 * position + 4)), states)
        outputs.append(out)
    for index in range(4):
        expected, expected_state = recurrence(everything.at(slice(index, None, 4)), first[index])
        close(torch.stack(outputs)[:, index], expected)
        close(states[index], expected_state)


def test_unit_vectors() -> None:
    heads = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    close(unit_vectors(heads), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
