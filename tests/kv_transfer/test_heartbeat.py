from kv_transfer.heartbeat import LOOK_SECONDS, SILENCE_SECONDS, Silence


def looks(silence: Silence, start: float, seconds: float, every: float = LOOK_SECONDS) -> list[bool]:
    return [silence.look(start + index * every) for index in range(round(seconds / every) + 1)]


def test_a_silence_is_noticed_when_it_is_long_enough_and_ends_with_a_sign_of_life() -> None:
    silence = Silence()
    seen = looks(silence, 100.0, 2.0)
    assert seen.index(True) * LOOK_SECONDS <= SILENCE_SECONDS + 2 * LOOK_SECONDS
    assert not any(seen[: round(SILENCE_SECONDS / LOOK_SECONDS) - 1])
    silence.heard()
    assert not silence.look(102.1)


def test_who_did_not_run_has_heard_nothing_and_concludes_nothing() -> None:
    silence = Silence()
    assert not any(looks(silence, 100.0, 1.0))
    assert not silence.look(500.0)
    silence.heard()
    assert not silence.look(500.1)
    # But it does look in the end, however rarely.
    assert any(looks(silence, 501.0, 20.0, every=1.0))
