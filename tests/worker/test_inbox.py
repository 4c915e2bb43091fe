import threading
import time

from worker.inbox import Inbox


def test_everything_arrives_once_and_in_each_senders_order() -> None:
    inbox: Inbox[tuple[int, int]] = Inbox()

    def send(sender: int) -> None:
        for number in range(500):
            inbox.put((sender, number))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    taken: list[tuple[int, int]] = []
    while len(taken) < 2000:
        batch = inbox.take(5.0)
        assert batch
        taken += batch
    for thread in threads:
        thread.join()
    assert inbox.take(0.0) == []
    for sender in range(4):
        assert [number for who, number in taken if who == sender] == list(range(500))


def test_take_waits_for_the_first_event_only() -> None:
    inbox: Inbox[str] = Inbox()
    begin = time.monotonic()
    assert inbox.take(0.05) == []
    assert time.monotonic() - begin >= 0.05
    assert inbox.take(0.0) == []
    threading.Timer(0.05, inbox.put, ["late"]).start()
    assert inbox.take(30.0) == ["late"]
    inbox.put("one")
    inbox.put("two")
    begin = time.monotonic()
    assert inbox.take(30.0) == ["one", "two"]
    assert time.monotonic() - begin < 5.0


def test_who_waits_can_be_woken_with_nothing() -> None:
    inbox: Inbox[str] = Inbox()
    threading.Timer(0.05, inbox.wake).start()
    assert inbox.take(30.0) == []
    inbox.wake()
    inbox.put("event")
    inbox.wake()
    assert inbox.take(30.0) == ["event"]
    assert inbox.take(0.0) == []
