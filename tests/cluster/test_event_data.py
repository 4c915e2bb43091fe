"""Server-sent events as clients read them, cut into pieces of any size."""

import json
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from cluster.client import event_data


@given(
    texts=st.lists(st.text(alphabet=st.sampled_from("a\u2028\u2029\x85\x0b\x0c\x1c\x1e é\U0001f600")), max_size=4),
    end=st.sampled_from(["\n", "\r\n"]),
    size=st.integers(1, 40),
)
def test_text_keeps_what_unicode_calls_a_line_break(texts: list[str], end: str, size: int) -> None:
    sent = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    stream = "".join(f"data: {data}{end}{end}" for data in (*sent, "[DONE]")).encode()

    def pieces() -> Iterator[bytes]:
        for begin in range(0, len(stream), size):
            yield stream[begin : begin + size]

    assert [json.loads(data)["text"] for data in event_data(pieces())] == texts
