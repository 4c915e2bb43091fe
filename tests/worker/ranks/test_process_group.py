"""Ranks as threads that put tensors together over real sockets, and what those see of whom they have lost."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TypeVar

import grpc
import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from kv_transfer.group_store import GroupStore
from kv_transfer.wire.kv_transfer_pb2 import StoreRequest
from worker.ranks import process_group
from worker.ranks.followers import STORE_METHOD, Followers
from worker.ranks.process_group import RankLost, TorchRankGroup
from worker.ranks.rank_group import SOLO

CPU = torch.device("cpu")
SECONDS = 20.0

T = TypeVar("T")
StoreOf = Callable[[int], Store]
"""How a rank reaches the place where all meet."""


def meet(store_of: StoreOf, rank: int, size: int) -> TorchRankGroup:
    return TorchRankGroup(store_of(rank), rank, size, CPU, "127.0.0.1")


def on_every_rank(store_of: StoreOf, size: int, work: Callable[[TorchRankGroup], T]) -> list[T]:
    """What ``work`` makes of each rank's group, all ranks at once."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result(SECONDS) for future in started(pool, store_of, size, work)]


def started(
    pool: ThreadPoolExecutor, store_of: StoreOf, size: int, work: Callable[[TorchRankGroup], T]
) -> list[Future[T]]:
    return [pool.submit(lambda rank: work(meet(store_of, rank, size)), rank) for rank in range(size)]


def one_store() -> StoreOf:
    """The same object for all."""
    store = HashStore()
    return lambda rank: store


@pytest.fixture
def leaders_store() -> Iterator[StoreOf]:
    """The leading rank's own for itself, for the others over the connection that they have."""
    followers = Followers("decode-1", 4, "127.0.0.1")
    channels = [grpc.insecure_channel(followers.address) for _ in range(4)]

    def store_of(rank: int) -> Store:
        if rank == 0:
            return followers.store
        return GroupStore(channels[rank].unary_unary(STORE_METHOD), patience=SECONDS)

    yield store_of
    for channel in channels:
        channel.close()
    followers.stop()


def part(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rank's own numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


SHAPES = [(1,), (3, 5), (2, 3, 4), (1000, 33), (0, 7)]


@torch.inference_mode()
def put_together(
    group: TorchRankGroup, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
    """Of every shape the sum, what is gathered, and what came out of the tensor that was summed."""
    results = []
    for shape in SHAPES:
        partial = part(group.rank, *shape, dtype=dtype)
        results.append((group.sum(partial), group.gather(part(group.rank, *shape, dtype=dtype)), partial))
    return results


def require_put_together(
    every: list[list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]], dtype: torch.dtype
) -> None:
    size = len(every)
    for index, shape in enumerate(SHAPES):
        parts = [part(rank, *shape, dtype=dtype) for rank in range(size)]
        exact = torch.stack([one.double() for one in parts]).sum(0)
        tolerance = 0.05 if dtype is torch.bfloat16 else 1e-5
        for rank in range(size):
            total, gathered, partial = every[rank][index]
            assert total.dtype == dtype
            torch.testing.assert_close(total.double(), exact, rtol=tolerance, atol=tolerance)
            assert torch.equal(total, every[0][index][0]), "ranks that differ by a bit choose other tokens"
            assert partial is total, "in place"
            if rank:
                assert gathered is None
            else:
                assert gathered is not None
                assert torch.equal(gathered, torch.cat(parts, dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_put_together_on_every_rank_alike(size: int, dtype: torch.dtype) -> None:
    every = on_every_rank(one_store(), size, lambda group: put_together(group, dtype))
    require_put_together(every, dtype)


def test_ranks_meet_over_the_connection_to_their_leader(leaders_store: StoreOf) -> None:
    every = on_every_rank(leaders_store, 4, lambda group: put_together(group, torch.float32))
    require_put_together(every, torch.float32)


def test_several_replicas_in_one_process_do_not_mix() -> None:
    stores = [one_store(), one_store()]

    def add(number: float, group: TorchRankGroup) -> torch.Tensor:
        return group.sum(torch.tensor([number]))

    with ThreadPoolExecutor(4) as pool:
        futures = [
            started(pool, store, 2, partial(add, number)) for number, store in zip((1.0, 10.0), stores, strict=True)
        ]
        totals = [[future.result(SECONDS).item() for future in each] for each in futures]
    assert totals == [[2.0, 2.0], [20.0, 20.0]]


def test_parts_of_larger_tensors_are_gathered_and_left_as_they_were() -> None:
    def work(group: TorchRankGroup) -> torch.Tensor | None:
        whole = part(9, 4, 10)
        columns = whole[:, group.rank * 5 : group.rank * 5 + 5]
        assert not columns.is_contiguous()
        gathered = group.gather(columns)
        assert torch.equal(whole, part(9, 4, 10))
        return gathered

    first, second = on_every_rank(one_store(), 2, work)
    assert second is None
    assert first is not None
    assert torch.equal(first, part(9, 4, 10))


def test_a_rank_that_is_alone_has_nothing_to_put_together() -> None:
    partial = part(0, 3, 4)
    assert SOLO.sum(partial) is partial
    assert SOLO.gather(partial) is partial


# Ranks that are lost


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "COLLECTIVE_SECONDS", 1.0)
    monkeypatch.setattr(process_group, "MEET_SECONDS", 1.0)


def collectives() -> list[Callable[[TorchRankGroup], object]]:
    return [lambda group: group.sum(torch.ones(1000)), lambda group: group.gather(torch.ones(1000))]


@pytest.mark.parametrize("collective", collectives(), ids=["sum", "gather"])
@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_gone_is_noticed_by_the_others_long_before_one_that_hangs_would_be(
    collective: Callable[[TorchRankGroup], object], gone: int
) -> None:
    assert process_group.COLLECTIVE_SECONDS > SECONDS
    left = threading.Event()

    def work(group: TorchRankGroup) -> str:
        collective(group)
        if group.rank == gone:
            # Nobody else has it: its sockets are closed.
            del group._group
            left.set()
            return ""
        assert left.wait(SECONDS)
        with pytest.raises(RankLost) as loss:
            collective(group)
        return str(loss.value)

    said = on_every_rank(one_store(), 2, work)
    assert f"rank {1 - gone} of 2 has lost the others" in said[1 - gone]


@pytest.mark.parametrize("collective", collectives(), ids=["sum", "gather"])
def test_a_rank_that_hangs_is_given_up_after_a_while(
    impatient: None, collective: Callable[[TorchRankGroup], object]
) -> None:
    over = threading.Event()

    def work(group: TorchRankGroup) -> None:
        collective(group)
        if group.rank == 1:
            assert over.wait(SECONDS)
            return
        try:
            with pytest.raises(RankLost, match="rank 0 of 2 has lost the others"):
                collective(group)
        finally:
            over.set()

    on_every_rank(one_store(), 2, work)


def test_a_rank_that_never_comes_is_not_waited_for_for_ever(impatient: None) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(partial(meet, lambda rank: store, 0, 2))
        with pytest.raises(RankLost, match="rank 0 of 2 has not met the others"):
            meeting.result(SECONDS)


def test_a_leader_that_never_comes_is_not_waited_for_for_ever(impatient: None) -> None:
    """Where the others would meet it there is nobody."""
    with grpc.insecure_channel("127.0.0.1:1") as channel, ThreadPoolExecutor(1) as pool:
        store = GroupStore(channel.unary_unary(STORE_METHOD), patience=0.2)
        meeting = pool.submit(partial(meet, lambda rank: store, 1, 2))
        with pytest.raises(RankLost, match="rank 1 of 2 has not met the others"):
            meeting.result(SECONDS)


def test_who_asks_for_nothing_or_has_gone_holds_no_thread_of_the_leader() -> None:
    followers = Followers("decode-1", 2, "127.0.0.1")
    try:
        with grpc.insecure_channel(followers.address) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(STORE_METHOD)
            with pytest.raises(grpc.RpcError, match="neither a value nor a time to wait"):
                call(StoreRequest(key="nothing").SerializeToString(), timeout=SECONDS)
            # More than there are threads, for longer than anybody lives.
            for number in range(20):
                request = StoreRequest(key=f"key-{number}", get=(1 << 32) - 1)
                with pytest.raises(grpc.RpcError):
                    call(request.SerializeToString(), timeout=0.05)
            call(StoreRequest(key="a", set=b"1").SerializeToString(), timeout=SECONDS)
            assert call(StoreRequest(key="a", get=1000).SerializeToString(), timeout=SECONDS) == b"1"
    finally:
        followers.stop()
