"""LangChain, LiteLLM and curl: what plain HTTP gets, in their own words."""

import json
import subprocess
import textwrap
from typing import Any

import httpx

from tests.clients.conftest import Clients

QUESTION = "What is the capital of France?"
COMMON = f"question = {QUESTION!r}\nimport json, os\nurl = os.environ['OPENAI_BASE_URL']\n"


def asked(http: httpx.Client, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24, **more}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def run(clients: Clients, program: str) -> dict[str, Any]:
    """Run a program in the clients' environment; it prints one JSON object last."""
    output = clients.run("python", "-c", COMMON + textwrap.dedent(program))
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def test_langchain(clients: Clients, http: httpx.Client) -> None:
    result = run(
        clients,
        """
        from langchain_core.messages import HumanMessage
        from langchain_openai import ChatOpenAI, OpenAI
        from pydantic import BaseModel, Field

        class City(BaseModel):
            name: str = Field(max_length=20)
            country: str = Field(max_length=20)

        model = ChatOpenAI(model="smollm2", temperature=0, max_tokens=24)
        whole = model.invoke([HumanMessage(question)])
        chunks = list(model.stream(question, stream_usage=True))
        several = [answer.content for answer in model.batch([question] * 3)]
        city = ChatOpenAI(model="smollm2", temperature=0).with_structured_output(City).invoke(question)
        text = OpenAI(model="smollm2", temperature=0, max_tokens=8).invoke("The capital of France is")
        print(json.dumps({
            "whole": whole.content,
            "usage": whole.usage_metadata,
            "streamed": "".join(chunk.content for chunk in chunks),
            "stream_usage": next(c.usage_metadata for c in reversed(chunks) if c.usage_metadata),
            "several": several,
            "city": city.model_dump(),
            "text": text,
        }))
        """,
    )
    expected = asked(http)
    content = expected["choices"][0]["message"]["content"]
    assert (result["whole"], result["streamed"], result["several"]) == (content, content, [content] * 3)
    tokens = {name: expected["usage"][theirs] for name, theirs in TOKENS.items()}
    assert {name: result["usage"][name] for name in TOKENS} == tokens
    assert {name: result["stream_usage"][name] for name in TOKENS} == tokens
    assert set(result["city"]) == {"name", "country"}
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    assert result["text"] == http.post("/v1/completions", json=body).json()["choices"][0]["text"] != ""


TOKENS = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens", "total_tokens": "total_tokens"}


def test_litellm(clients: Clients, http: httpx.Client) -> None:
    result = run(
        clients,
        """
        import litellm

        messages = [{"role": "user", "content": question}]
        settings = {"messages": messages, "temperature": 0, "max_tokens": 24, "api_base": url, "api_key": "unused"}
        whole = {}
        streamed = {}
        for provider in ("openai", "hosted_vllm"):
            model = f"{provider}/smollm2"
            whole[provider] = litellm.completion(model=model, **settings).choices[0].message.content
            stream = litellm.completion(model=model, stream=True, stream_options={"include_usage": True}, **settings)
            chunks = list(stream)
            streamed[provider] = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
        format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        answer = litellm.completion(model="hosted_vllm/smollm2", response_format=format, **settings)
        print(json.dumps({"whole": whole, "streamed": streamed, "json": answer.choices[0].message.content}))
        """,
    )
    content = asked(http)["choices"][0]["message"]["content"]
    assert result["whole"] == result["streamed"] == {"openai": content, "hosted_vllm": content}
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert result["json"] == asked(http, response_format=response_format)["choices"][0]["message"]["content"]


def test_curl(clients: Clients, http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24, "stream": True}
    finished = subprocess.run(
        [
            "curl",
            "-sSN",
            "-H",
            "Content-Type: application/json",
            "-d",
            json.dumps(body),
            f"{clients.base_url}/v1/chat/completions",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    events = [line.removeprefix("data: ") for line in finished.stdout.splitlines() if line]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == asked(http)["choices"][0]["message"]["content"]
