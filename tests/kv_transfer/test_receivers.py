from kv_transfer.heartbeat import LOOK_SECONDS, SILENCE_SECONDS
from kv_transfer.outgoing_stream import OutgoingStream
from kv_transfer.receivers import Receivers


def look(receivers: Receivers, start: float, seconds: float) -> None:
    for index in range(round(seconds / LOOK_SECONDS) + 1):
        receivers.look(start + index * LOOK_SECONDS)


def test_only_what_a_silent_receiver_takes_is_cancelled() -> None:
    receivers = Receivers()
    silent, lively = OutgoingStream(), OutgoingStream()
    # A call may come before its caller has asked for the pulse for the first time.
    with receivers.taking("silent", silent), receivers.taking("lively", lively):
        receivers.heard("silent")
        receivers.heard("lively")
        look(receivers, 100.0, SILENCE_SECONDS / 2)
        assert not silent.cancelled
        receivers.heard("lively")
        look(receivers, 100.0 + SILENCE_SECONDS / 2, SILENCE_SECONDS / 2 + 2 * LOOK_SECONDS)
        assert silent.cancelled
        assert not lively.cancelled
        # It is listened for again when it goes on.
        receivers.heard("silent")
        later = OutgoingStream()
        with receivers.taking("silent", later):
            look(receivers, 200.0, SILENCE_SECONDS + 2 * LOOK_SECONDS)
            assert later.cancelled
    assert not receivers._receivers, "whoever is gone is forgotten"


def test_who_never_asks_by_name_is_not_judged() -> None:
    receivers = Receivers()
    stream = OutgoingStream()
    with receivers.taking("older", stream):
        look(receivers, 100.0, 60.0)
        assert not stream.cancelled
    assert not receivers._receivers
