import os
import pickle
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, ConfigError
from cluster.openai.api_keys import ANYBODY, LOOK_SECONDS, ApiKey, ApiKeyError, ApiKeys, Caller, read_keys
from tests.cluster.scripted_engine import ScriptedEngine, always

SECRET = "sk-canary-5d41402abc4b2a76"
ROUTES = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/org/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/cluster"),
    ("GET", "/nowhere"),
    ("GET", "/health/"),
)
COMPLETION = {"prompt": "hello", "max_tokens": 1}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_names_its_keys(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", f"# people\nalice:{SECRET}\n\n  bob:b:with:colons  \nalice:another\nnameless-key\n")
    keys = ApiKeys(file=file)
    assert keys.caller(f"Bearer {SECRET}".encode()) == Caller("alice")
    assert keys.caller(b"bearer another") == Caller("alice")
    assert keys.caller(b"Bearer b:with:colons") == Caller("bob")
    nameless = keys.caller(b"Bearer nameless-key")
    assert nameless is not None
    assert nameless.name.startswith("key-")
    for wrong in (b"", b"Bearer", b"Bearer ", b"Basic another", b"another", f"Bearer {SECRET[:-1]}".encode(), b"\xff"):
        assert keys.caller(wrong) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no key"),
        ("# none\n", "holds no key"),
        ("a b:key\n", "line 1: a name"),
        ("x\nalice:\n", "line 2: a key"),
        (f"alice:{SECRET} {SECRET}\n", "line 1: a key"),
        (f"{SECRET}\nbob:{SECRET}\n", "line 2: this key was there before"),
        ("k" * 600, "line 1: a key"),
        ("\n" * (1 << 21), "larger than"),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_without_showing_a_key(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ApiKeyError, match=complaint) as refusal:
        read_keys(write(tmp_path / "keys", text))
    assert SECRET not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApiKeyError, match="No such file"):
        ApiKeys(file=tmp_path / "keys")
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ApiKeyError, match="not text"):
        ApiKeys(file=tmp_path / "keys")


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    file = write(tmp_path / "keys", "alice:one\n")
    keys = ApiKeys([ApiKey.of("fixed", "default")], file, clock)

    def replace(text: str) -> None:
        # As Kubernetes does it: another file in the place of the first.
        os.replace(write(tmp_path / "new", text), file)
        clock.now += 2 * LOOK_SECONDS

    replace("bob:two\n")
    assert keys.caller(b"Bearer one") is None
    assert keys.caller(b"Bearer two") == Caller("bob")
    replace(f"not a name:{SECRET}\n")
    assert keys.caller(b"Bearer two") == Caller("bob")
    file.unlink()
    clock.now += 2 * LOOK_SECONDS
    assert keys.caller(b"Bearer two") == Caller("bob")
    assert keys.caller(b"Bearer fixed") == Caller("default")
    assert "stay as they were" in caplog.text
    assert SECRET not in caplog.text


def test_nothing_shows_a_key(tmp_path: Path) -> None:
    config = ClusterConfig(model="m", api_key=SECRET)
    key = ApiKey.of(SECRET)
    for shown in (config, key, ApiKeys([key]), config.model_dump(), vars(ApiKeys([key]))):
        assert SECRET not in repr(shown)
        assert SECRET not in str(shown)
    assert SECRET.encode() not in pickle.dumps(key), "Ray keeps what deployments are made with"
    with pytest.raises(ConfigError) as refusal:
        ClusterConfig.load(model="m", api_key=[SECRET])
    assert SECRET not in str(refusal.value)


@pytest.mark.anyio
@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_but_probes_needs_a_key(client, method: str, path: str) -> None:
    engine = ScriptedEngine(always([5]))
    async with client(engine, api_keys=ApiKeys([ApiKey.of(SECRET)])) as http:
        for headers in ({}, bearer("wrong"), {"Authorization": f"Basic {SECRET}"}):
            refusal = await http.request(method, path, headers=headers, json=COMPLETION)
            assert refusal.status_code == 401
            assert refusal.headers["www-authenticate"] == "Bearer"
            error = refusal.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            assert SECRET not in refusal.text
        both = [("Authorization", f"Bearer {SECRET}"), ("Authorization", "Bearer wrong")]
        assert (await http.request(method, path, headers=both)).status_code == 401
        assert (await http.request(method, path, headers=bearer(SECRET), json=COMPLETION)).status_code != 401
        for probe in ("/health", "/ping", "/metrics"):
            assert (await http.get(probe)).status_code == 200
    assert len(engine.submits) <= 1


@pytest.mark.anyio
async def test_a_body_is_not_read_for_nobody(client) -> None:
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1
            yield b" " * 1024

    async with client(ScriptedEngine(always([5])), api_keys=ApiKeys([ApiKey.of(SECRET)])) as http:
        refusal = await http.post("/v1/completions", content=endless())
    assert refusal.status_code == 401
    assert sent <= 1


@pytest.mark.anyio
async def test_each_key_may_have_cached_prefixes_of_its_own(client) -> None:
    engine = ScriptedEngine(always([5]))
    keys = ApiKeys([ApiKey.of("k1", "alice"), ApiKey.of("k2", "alice"), ApiKey.of("k3", "bob")])
    async with client(engine, api_keys=keys, prefix_cache_per_key=True) as http:
        for key in ("k1", "k2", "k3"):
            for salt in (None, "x"):
                body = {**COMPLETION, "cache_salt": salt}
                assert (await http.post("/v1/completions", headers=bearer(key), json=body)).status_code == 200
    one, one_salted, two, two_salted, three, three_salted = (submit.cache_salt for submit in engine.submits)
    assert (one, one_salted) == (two, two_salted)
    assert len({one, one_salted, three, three_salted}) == 4


@pytest.mark.anyio
async def test_without_keys_everybody_is_anybody(client) -> None:
    engine = ScriptedEngine(always([5]))
    async with client(engine) as http:
        assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert (await http.post("/v1/completions", json=COMPLETION, headers=bearer("any"))).status_code == 200
    assert ApiKeys().caller(b"") == ANYBODY
