import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from cluster.client import ApiClient, ApiError
from cluster.config import ClusterConfig, ConfigError
from cluster.http_server import http_server
from cluster.tls import TlsError, TlsFiles, client_context
from tests.cluster.command_line import Run, refused
from tests.cluster.http_endpoint import listening, small_app

AUTHORITY = trustme.CA()


def write(directory: Path, *names: str) -> TlsFiles:
    """A certificate for names, as files."""
    issued = AUTHORITY.issue_cert(*names)
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    return TlsFiles(certificate, key)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    AUTHORITY.cert_pem.write_to_path(tmp_path / "authority.pem")
    return tmp_path / "authority.pem"


def test_clients_trust_whom_they_are_told_to(tmp_path: Path, authority: Path, crosskv: Run) -> None:
    files = write(tmp_path, "127.0.0.1")
    with listening(http_server(small_app(), files.server_context(), 1.0)) as endpoint:
        url = endpoint.url("https")
        with ApiClient(url, ca=authority) as client:
            assert client.model_name() == "fake-model"
        with ApiClient(url) as client, pytest.raises(ApiError, match="--ca"):
            client.model_name()
        assert "--ca" in refused(crosskv("status", "--base-url", url))
        # The model's name is found; /cluster is not there.
        assert "/cluster: HTTP 404" in refused(crosskv("status", "--base-url", url, "--ca", str(authority)))
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{endpoint.url('http')}/v1/models")


def test_whoever_started_a_server_knows_it_by_its_certificate_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files, other = write(tmp_path, "api.example"), write(tmp_path / "other", "api.example")
    with listening(http_server(small_app(), files.server_context(), 1.0)) as endpoint:
        url = f"{endpoint.url('https')}/v1/models"
        assert httpx.get(url, verify=files.own_context()).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(url, verify=other.own_context())


def test_old_versions_of_tls_are_refused(tmp_path: Path) -> None:
    assert write(tmp_path, "a").server_context().minimum_version >= ssl.TLSVersion.TLSv1_2


def test_files_that_cannot_be_used_are_refused_by_flag(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files, other = write(tmp_path, "a"), write(tmp_path / "other", "a")
    with pytest.raises(TlsError, match=r"--tls-key \S+nowhere: No such file"):
        TlsFiles(files.certificate, tmp_path / "nowhere").server_context()
    with pytest.raises(TlsError, match="not a certificate and its key"):
        TlsFiles(files.certificate, other.key).server_context()
    with pytest.raises(TlsError, match="not a certificate and its key"):
        TlsFiles(Path(__file__), files.key).server_context()
    with pytest.raises(TlsError, match=r"--ca \S+nowhere: No such file"):
        client_context(tmp_path / "nowhere")
    with pytest.raises(TlsError, match="no certificate in PEM"):
        client_context(Path(__file__))


def test_certificate_and_key_belong_together() -> None:
    with pytest.raises(ConfigError, match="--tls-key"):
        _ = ClusterConfig(model="m", tls_certificate="/c").tls
    assert ClusterConfig(model="m").tls is None
    assert ClusterConfig(model="m", tls_certificate="/c", tls_key="/k").tls == TlsFiles(Path("/c"), Path("/k"))
