"""Whatever the API's own description allows, and much that it does not, is answered without a server error."""

from collections.abc import Iterator

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation

from cluster.http_server import http_server
from cluster.openai.api_keys import ApiKey, ApiKeys
from cluster.openai.authentication import OPEN_PATHS
from cluster.openai.description import describe_api
from cluster.openai.status_page import PAGE
from tests.cluster.http_endpoint import listening
from tests.cluster.scripted_engine import ScriptedEngine, emit
from worker.wire.engine_pb2 import Output, Submit

KEY = "key-for-the-description"
UNDESCRIBED = {"/openapi.json", *PAGE}


def answer(submit: Submit) -> list[list[Output]]:
    """Every choice, two tokens long, or none at all."""
    tokens = range(5, 5 + min(2, submit.sampling.max_tokens))
    return [message for choice in range(submit.n) for message in emit(submit, tokens, choice=choice, per_message=2)]


@pytest.fixture(scope="module")
def app(make_app) -> FastAPI:
    return make_app(ScriptedEngine(answer), api_keys=ApiKeys([ApiKey.of(KEY)]), max_model_len=4096)


@pytest.fixture(scope="module")
def url(app: FastAPI) -> Iterator[str]:
    with listening(http_server(app, None, 1.0)) as endpoint:
        yield endpoint.url()


schema = schemathesis.openapi.from_dict(describe_api())
OPERATIONS = [result.ok() for result in schema.get_all_operations()]
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.mark.parametrize("mode", MODES, ids=["as described", "otherwise"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.label for operation in OPERATIONS])
@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nothing_is_a_server_error(
    operation: APIOperation, mode: GenerationMode, url: str, data: st.DataObject
) -> None:
    case = data.draw(operation.as_strategy(generation_mode=mode))
    answer = case.call_and_validate(
        base_url=url, headers={"Authorization": f"Bearer {KEY}"}, checks=[not_a_server_error]
    )
    event(f"status {answer.status_code}")


@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.label for operation in OPERATIONS])
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_without_a_key_nothing_but_probes_is_answered(operation: APIOperation, url: str, data: st.DataObject) -> None:
    response = data.draw(operation.as_strategy()).call(base_url=url)
    assert response.status_code == (200 if operation.path in OPEN_PATHS else 401)


def test_every_route_is_described(app: FastAPI) -> None:
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in app.routes
        for method in getattr(route, "methods", ())
        if method != "HEAD" and route.path not in UNDESCRIBED
    }
    described = {(path, method) for path, methods in describe_api()["paths"].items() for method in methods}
    assert routes == described
