"""Grammars through whole replicas: a tiny random model says only what they allow."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.conftest import EngineProcesses
from tests.engine_client import Answer, EngineClient, PendingAnswer, RequestFailed
from tests.engine_process import EngineProcess
from tests.replicas import colocated, disaggregated
from tests.worker.grammar.conftest import Babbler
from tests.worker.grammar.random_schemas import SchemaMaker
from worker.wire import engine_pb2 as wire

SCHEMAS = 200
SAMPLED = {"temperature": 1.0, "ignore_eos": False}
FEW = {"top_k": 8}
"""Few candidates: the random number then hardly ever falls so near to a border that rounding decides."""

# What of ``format`` the grammar keeps to the letter.
FORMATS = jsonschema.FormatChecker(["ipv4", "uuid"])


def schema_grammar(schema: Any, *, compact: bool = True) -> wire.Grammar:
    return wire.Grammar(json_schema=json.dumps(schema), compact=compact)


def submit_schemas(client: EngineClient, babbler: Babbler, schemas: list[Any], **sampling: Any) -> list[PendingAnswer]:
    return [
        client.submit(
            babbler.prompt(),
            grammar=schema_grammar(schema, compact=index % 2 == 0),
            **{"seed": index, "max_tokens": 250, "logit_bias": babbler.brief, **SAMPLED, **sampling},
        )
        for index, schema in enumerate(schemas)
    ]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """For one replica, whose process that compiles grammars takes seconds to start."""
    with EngineProcess(tmp_path_factory.mktemp("grammars") / "engine.log") as process:
        yield process


@pytest.fixture(scope="module")
def running(babbler: Babbler, process: EngineProcess) -> Iterator[EngineClient]:
    with colocated(process, babbler.config(max_running_requests=48)) as client:
        yield client


@pytest.fixture
def engine(running: EngineClient, process: EngineProcess) -> Iterator[EngineClient]:
    """The replica of this module's tests, which must hold nothing after each."""
    yield running
    running.settled()
    print(process.new_output())


def test_what_ends_by_itself_validates(babbler: Babbler, engine: EngineClient) -> None:
    schemas = [SchemaMaker(seed).make() for seed in range(SCHEMAS)]
    answers = [pending.result(400.0) for pending in submit_schemas(engine, babbler, schemas)]
    ended = 0
    for schema, answer in zip(schemas, answers, strict=True):
        (choice,) = answer.choices
        if choice.finish_reason == wire.FINISH_REASON_STOP:
            ended += 1
            text = babbler.text([t for t in choice.tokens if t != choice.stop_token_id])
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))
        else:
            assert choice.finish_reason == wire.FINISH_REASON_LENGTH
    assert ended > SCHEMAS * 0.8


def test_both_modes_say_the_same(babbler: Babbler, engine: EngineClient, engine_processes: EngineProcesses) -> None:
    schemas = [SchemaMaker(seed).make() for seed in range(24)]

    def ask(client: EngineClient) -> list[Answer]:
        return [
            pending.result(300.0) for pending in submit_schemas(client, babbler, schemas, **FEW, n=2, max_tokens=100)
        ]

    alone = ask(engine)
    with disaggregated(engine_processes.first, engine_processes.second, babbler.config()) as pair:
        apart = ask(pair.decode)
        assert pair.decode.settled().counters.transfers > 0
    assert [[c.tokens for c in a.choices] for a in alone] == [[c.tokens for c in a.choices] for a in apart]
    assert any(first.tokens != second.tokens for first, second in (answer.choices for answer in apart))


def test_regex_choice_and_rules(babbler: Babbler, engine: EngineClient) -> None:
    choices = ["yes", "no", 'mayb"e', "größer als"]
    tag = {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in choices]}
    structural = json.dumps({"type": "structural_tag", "format": tag})
    pending = {
        kind: [
            engine.submit(babbler.prompt(), grammar=grammar, seed=seed, max_tokens=60, **SAMPLED) for seed in range(12)
        ]
        for kind, grammar in {
            "regex": wire.Grammar(regex=r"[a-f]{3,12}-\d{2}(x|yz)?"),
            "choice": wire.Grammar(structural_tag=structural),
            "rules": wire.Grammar(ebnf='root ::= "(" root ")" | [0-9]'),
        }.items()
    }
    texts = {kind: [babbler.text(each.result().tokens) for each in all_] for kind, all_ in pending.items()}
    assert all(re.fullmatch(r"[a-f]{3,12}-\d{2}(x|yz)?", text) for text in texts["regex"])
    assert {*texts["choice"]} <= {*choices}
    assert len({*texts["choice"]}) > 1
    assert all(re.fullmatch(r"(\(*)[0-9](\)*)", text) and text.count("(") == text.count(")") for text in texts["rules"])


@pytest.mark.parametrize("ends", [{"ignore_eos": True}, {"min_tokens": 30}, {"stop_token_ids": [30]}], ids=str)
def test_ends(babbler: Babbler, engine: EngineClient, ends: dict[str, Any]) -> None:
    """A text that is complete ends, whatever else ends texts; nothing else ends it before."""
    if "stop_token_ids" in ends:
        ends = {"stop_token_ids": [babbler.tokenizer.encode("b", add_special_tokens=False)[0]]}
    answer = engine.generate(
        babbler.prompt(), grammar=wire.Grammar(regex="[abc]{5}"), n=8, max_tokens=40, **SAMPLED | ends
    )
    # Here the text may go on for ever, and end at any token.
    endless = engine.generate(
        babbler.prompt(), grammar=wire.Grammar(regex="[ac]*"), n=8, max_tokens=40, **SAMPLED | ends
    )
    for choice in answer.choices:
        assert re.fullmatch("[abc]{5}", babbler.text(choice.tokens))
        assert choice.finish_reason == wire.FINISH_REASON_STOP
    for choice in endless.choices:
        text = babbler.text([t for t in choice.tokens if t != choice.stop_token_id])
        assert re.fullmatch("[ac]*", text)
        assert len(choice.tokens) >= ends.get("min_tokens", 0)
        assert choice.finish_reason == wire.FINISH_REASON_LENGTH or "ignore_eos" not in ends


def test_a_resumed_request_goes_on_within_its_grammar(babbler: Babbler, engine: EngineClient) -> None:
    grammar = wire.Grammar(regex="[a-z]{3}-[0-9]{8}")
    prompt = babbler.prompt()
    settings: dict[str, Any] = {"grammar": grammar, "seed": 3, "max_tokens": 40, **SAMPLED, **FEW}
    whole = engine.generate(prompt, **settings).tokens
    for kept in range(1, len(whole)):
        resumed = engine.generate([*prompt, *whole[:kept]], prompt_len=len(prompt), **settings).tokens
        assert whole[:kept] + resumed == whole
    with pytest.raises(RequestFailed, match="does not follow the request's grammar"):
        engine.generate([*prompt, prompt[0]], prompt_len=len(prompt), **settings)


def test_preempted_requests_go_on_within_their_grammars(
    babbler: Babbler, engine: EngineClient, engine_processes: EngineProcesses
) -> None:
    schemas = [{"type": "array", "items": {"type": "integer"}, "minItems": 20}] * 12
    calm = [p.result().tokens for p in submit_schemas(engine, babbler, schemas, **FEW, max_tokens=60)]
    block = 16 * 2 * 2 * 2 * 16 * 4
    with colocated(engine_processes.first, babbler.config(kv_cache_memory=20 * block)) as client:
        pressed = [p.result().tokens for p in submit_schemas(client, babbler, schemas, **FEW, max_tokens=60)]
        assert client.status().counters.preemptions > 0
    assert pressed == calm


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (schema_grammar({"type": "array", "uniqueItems": True}), "uniqueItems is not supported"),
        (wire.Grammar(json_schema="{"), "not JSON"),
        (wire.Grammar(regex="(a"), "parenthesis is not closed"),
        (wire.Grammar(regex="(?=a)b"), "lookarounds are not supported"),
        (wire.Grammar(ebnf="root ::= other"), '"other" is not defined'),
        (wire.Grammar(structural_tag="{}"), "structural_tag"),
        (wire.Grammar(regex="a" * 70_000), "70000 bytes; at most 65536"),
        (wire.Grammar(), "of a kind that this replica does not know"),
        (wire.Grammar(regex="\ud7ff{1000000000000000000000}"), "regex"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_grammar_that_cannot_be_used_is_refused(
    babbler: Babbler, engine: EngineClient, grammar: wire.Grammar, message: str
) -> None:
    with pytest.raises(RequestFailed, match=re.escape(message)) as refused:
        engine.generate(babbler.prompt(), grammar=grammar)
    assert refused.value.kind == wire.ERROR_KIND_INVALID
    assert len(engine.generate(babbler.prompt(), max_tokens=3).tokens) == 3


def test_slow_grammars_cost_nobody_else_anything(babbler: Babbler, engine_processes: EngineProcesses) -> None:
    """One takes for ever to compile, others to follow; a text that runs beside them does not wait."""
    endless = schema_grammar({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}})
    ambiguous = wire.Grammar(ebnf="root ::= s\ns ::= s s s | s s | [a-z]")
    with colocated(engine_processes.first, babbler.config(max_model_len=4096)) as client:
        client.generate(babbler.prompt(), grammar=wire.Grammar(regex="a"))  # the process that compiles is there
        began = time.monotonic()
        slow = [client.submit(babbler.prompt(), grammar=grammar, max_tokens=200, **SAMPLED) for grammar in (endless,)]
        slow += [
            client.submit(babbler.prompt(), grammar=ambiguous, seed=s, max_tokens=200, **SAMPLED) for s in range(4)
        ]
        times = []
        for _ in range(30):
            asked = time.monotonic()
            client.generate(babbler.prompt(), max_tokens=10)
            times.append(time.monotonic() - asked)
        for pending in slow:
            with pytest.raises(RequestFailed, match=r"too much|more than 10 s") as refused:
                pending.result(120.0)
            assert refused.value.kind == wire.ERROR_KIND_INVALID
        assert time.monotonic() - began > 10
        print(f"ten tokens beside slow grammars: {sorted(times)[15]:.3f} s median, {max(times):.3f} s at most")
        assert max(times) < 5
        # The next grammar gets a new process.
        assert babbler.text(client.generate(babbler.prompt(), grammar=wire.Grammar(regex="ab")).tokens) == "ab"
