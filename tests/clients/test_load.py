"""Load generators find what they want in every answer: tokens one by one, and how many there were."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import Clients, payload_bytes
from tests.serving import Serving

REQUESTS = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 16


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(clients: Clients, served: Serving, tmp_path: Path, path: str) -> None:
    before = payload_bytes(served)
    clients.run(
        "guidellm",
        *("run", "--backend", f"kind=openai_http,target={clients.base_url},request_format={path}"),
        *("--tokenizer", f"kind=hf_auto,model={clients.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-progress"),
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    assert payload_bytes(served) > before
