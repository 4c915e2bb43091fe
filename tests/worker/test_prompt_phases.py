from kv_transfer.frame import EndFrame
from worker.prompt_phases import PromptPhases
from worker.wire import engine_pb2 as wire

END = EndFrame(epoch=1, payload_bytes=0, pieces=0, cached_tokens=0, queue_seconds=0.5, compute_seconds=1.25)


def test_a_transfer_that_failed_shows_as_a_later_start() -> None:
    phases = PromptPhases(arrived=10.0)
    phases.admitted(11.0)
    phases.admitted(14.0)
    phases.received(END, 17.0)
    assert phases.message(17.5) == wire.Phases(
        queue_ms=1000,
        start_ms=4000,
        transfer_ms=3000,
        prefill_queue_ms=500,
        prefill_ms=1250,
        first_token_ms=7500,
    )


def test_what_was_received_and_lost_again_is_not_reported() -> None:
    """Preempted before its first token, the prompt is computed locally the second time."""
    phases = PromptPhases(arrived=0.0)
    phases.admitted(1.0)
    phases.received(END, 2.0)
    phases.admitted(5.0)
    assert phases.message(6.0) == wire.Phases(queue_ms=1000, start_ms=5000, prefill_ms=1000, first_token_ms=6000)
