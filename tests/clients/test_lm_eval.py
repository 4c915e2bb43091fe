"""lm_eval through the server gives what its own transformers backend gives, which reads the same file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.model_store import resolve_model
from tests.clients.conftest import Clients, payload_bytes
from tests.serving import Serving

CLOSE = 1e-3
TASKS = Path(__file__).parent / "tasks"
CHAT = "--apply_chat_template"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What lm_eval says of each task: its metrics, and its samples by number."""

    metrics: dict[str, dict[str, float]]
    samples: dict[str, dict[int, dict[str, Any]]]


def evaluate(
    clients: Clients, output: Path, tasks: str, model: str, settings: dict[str, Any], *more: str
) -> Evaluation:
    arguments = ",".join(f"{key}={value}" for key, value in settings.items())
    clients.run(
        "lm_eval",
        *("--model", model, "--model_args", arguments, "--include_path", str(TASKS), "--tasks", tasks),
        *("--batch_size", "1", "--output_path", str(output), "--log_samples", *more),
        seconds=500.0,
    )
    (results,) = output.rglob("results_*.json")
    samples = {
        task: {line["doc_id"]: line for line in map(json.loads, next(output.rglob(f"samples_{task}_*")).open())}
        for task in tasks.split(",")
    }
    return Evaluation(json.loads(results.read_text())["results"], samples)


def with_transformers(clients: Clients, output: Path, tasks: str, *more: str) -> Evaluation:
    """The same file, read and computed by transformers."""
    files = resolve_model("smollm2")
    settings = {
        "pretrained": files.weights.parent,
        "gguf_file": files.weights.name,
        "tokenizer": files.tokenizer,
        "dtype": "float32",
    }
    return evaluate(clients, output, tasks, "hf", settings, "--device", "cpu", *more)


@pytest.fixture(scope="module")
def expected(clients: Clients, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    return with_transformers(clients, tmp_path_factory.mktemp("transformers"), "chosen,written")


@pytest.mark.parametrize("tokenizer", ["of the server", "of the client"])
def test_loglikelihoods(clients: Clients, expected: Evaluation, tmp_path: Path, tokenizer: str) -> None:
    settings = {"base_url": f"{clients.base_url}/v1/completions", "model": "smollm2", "num_concurrent": 4}
    if tokenizer == "of the client":
        settings |= {"tokenizer_backend": "huggingface", "tokenizer": clients.tokenizer}
    found = evaluate(clients, tmp_path, "chosen", "local-completions", settings)
    apart = []
    for number, theirs in expected.samples["chosen"].items():
        ours = found.samples["chosen"][number]
        for (mine, greedily), (wanted, wanted_greedily) in zip(
            ours["filtered_resps"], theirs["filtered_resps"], strict=True
        ):
            apart.append(abs(float(mine) - float(wanted)))
            assert greedily == wanted_greedily
    print(f"{len(apart)} log-likelihoods, at most {max(apart):.1e} apart")
    assert max(apart) < CLOSE
    for metric in ("acc,none", "acc_norm,none"):
        assert found.metrics["chosen"][metric] == expected.metrics["chosen"][metric]
    assert found.metrics["chosen"]["acc,none"] > 0.25


def require_same_texts(found: Evaluation, expected: Evaluation) -> None:
    for number, theirs in expected.samples["written"].items():
        assert found.samples["written"][number]["filtered_resps"] == theirs["filtered_resps"]
    assert found.metrics["written"]["exact_match,trimmed"] == expected.metrics["written"]["exact_match,trimmed"]


def test_texts(clients: Clients, expected: Evaluation, served: Serving, tmp_path: Path) -> None:
    settings = {"base_url": f"{clients.base_url}/v1/completions", "model": "smollm2", "num_concurrent": 4}
    before = payload_bytes(served)
    require_same_texts(evaluate(clients, tmp_path, "written", "local-completions", settings), expected)
    assert payload_bytes(served) > before


def test_texts_of_a_chat(clients: Clients, served: Serving, tmp_path: Path) -> None:
    settings = {"base_url": f"{clients.base_url}/v1/chat/completions", "model": "smollm2", "num_concurrent": 4}
    before = payload_bytes(served)
    found = evaluate(clients, tmp_path / "server", "written", "local-chat-completions", settings, CHAT)
    assert payload_bytes(served) > before
    require_same_texts(found, with_transformers(clients, tmp_path / "transformers", "written", CHAT))
