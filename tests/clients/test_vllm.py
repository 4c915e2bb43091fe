"""``vllm bench serve``, of the vLLM whose program ``CROSSKV_VLLM`` names."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import VLLM, Clients, payload_bytes
from tests.serving import Serving

REQUESTS = 12
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 16


@pytest.mark.parametrize(
    ("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")], ids=str
)
def test_bench_serve(clients: Clients, served: Serving, tmp_path: Path, backend: str, path: str) -> None:
    assert VLLM is not None
    before = payload_bytes(served)
    clients.run(
        Path(VLLM).absolute(),
        *("bench", "serve", "--backend", backend, "--base-url", clients.base_url, "--endpoint", path),
        *("--tokenizer", str(clients.tokenizer), "--dataset-name", "random", "--num-prompts", str(REQUESTS)),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
        seconds=500.0,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
    assert payload_bytes(served) > before
