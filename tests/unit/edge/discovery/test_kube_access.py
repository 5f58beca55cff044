"""Credentials for an API server: a pod's service account, or a kubeconfig."""

import asyncio
import contextlib
import ssl
from base64 import b64encode
from pathlib import Path

import pytest
import yaml

from din_extproc.domain.node import KubernetesObjects
from din_extproc.edge.discovery import kube_access
from din_extproc.edge.discovery.kube_access import AccessUnavailable, load_access
from din_extproc.edge.discovery.kubernetes import KubernetesSource
from tests.support.certificates import Authority
from tests.support.kube_server import KubeServer, make_slice
from tests.support.waiting import until

SECRET = "a-token-of-these-tests"
SLICE = make_slice("vllm-a", "vllm", [("10.0.0.1", {"ready": True})], 8000)


def write(folder: Path, cluster: dict, user: dict, **top: object) -> str:
    file = folder / "kubeconfig"
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        **top,
    }
    file.write_text(yaml.safe_dump(config))
    return str(file)


async def first_answer(kubeconfig: str = "", env: dict[str, str] | None = None):
    source = KubernetesSource(KubernetesObjects("inference", "http", service="vllm", kubeconfig=kubeconfig), env or {})
    async with contextlib.aclosing(source.follow()) as answers:
        return await anext(answers)


def encoded(file: str) -> str:
    return b64encode(Path(file).read_bytes()).decode()


@pytest.mark.parametrize("inline", [True, False])
async def test_a_client_certificate_is_taken_from_the_kubeconfig_or_from_files_beside_it(tmp_path, inline):
    authority = Authority(tmp_path)
    server_files, client = authority.issue("server", "127.0.0.1"), authority.issue("client", "din")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.file))
    tls.load_cert_chain(server_files["cert"], server_files["key"])
    tls.verify_mode = ssl.CERT_OPTIONAL
    with KubeServer(tls) as server:
        server.put(SLICE)
        if inline:
            cluster = {"server": server.url, "certificate-authority-data": encoded(str(authority.file))}
            user = {"client-certificate-data": encoded(client["cert"]), "client-key-data": encoded(client["key"])}
        else:
            cluster = {"server": server.url, "certificate-authority": authority.file.name}
            user = {"client-certificate": Path(client["cert"]).name, "client-key": Path(client["key"]).name}
        answer = await first_answer(write(tmp_path, cluster, user))
        assert (len(answer.endpoints), answer.problem) == (1, "")
        answer = await first_answer(write(tmp_path, {"server": server.url}, {"token": server.token}))
        assert "CERTIFICATE_VERIFY_FAILED" in answer.problem


async def test_a_service_account_s_token_is_read_again_when_it_was_rotated(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kube_access, "SERVICE_ACCOUNT", tmp_path)
    authority = Authority(tmp_path)
    authority.file.rename(tmp_path / "ca.crt")
    files = authority.issue("server", "127.0.0.1")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files["cert"], files["key"])
    with KubeServer(tls) as server:
        server.put(SLICE)
        (tmp_path / "token").write_text(f"{server.token}\n")
        host, port = server.url.removeprefix("https://").split(":")
        source = KubernetesSource(
            KubernetesObjects("inference", "http", service="vllm"), {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        )
        answers = []

        async def follow() -> None:
            async for answer in source.follow():
                answers.append(answer)  # noqa: PERF401 - it never ends

        task = asyncio.get_running_loop().create_task(follow())
        await until(lambda: server.watching)
        former, server.token = server.token, "another-token"
        server.drop_connections()
        await until(lambda: "does not accept the credentials" in answers[-1].problem)
        assert len(answers[-1].endpoints) == 1
        (tmp_path / "token").write_text(server.token)
        await until(lambda: not answers[-1].problem)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        output = caplog.text + "".join(each.problem + each.remedy for each in answers)
        assert former not in output
        assert server.token not in output


HTTPS = {"server": "https://10.0.0.1:6443"}


@pytest.mark.parametrize(
    ("cluster", "user", "top", "says"),
    [
        (HTTPS, {"exec": {"command": "aws"}}, {}, "`exec` is not supported"),
        (HTTPS, {"auth-provider": {"name": "gcp"}}, {}, "`auth-provider` is not supported"),
        ({**HTTPS, "insecure-skip-tls-verify": True}, {"token": SECRET}, {}, "`insecure-skip-tls-verify` is not supported"),
        ({**HTTPS, "proxy-url": "http://p"}, {"token": SECRET}, {}, "`proxy-url` is not supported"),
        ({"server": "http://10.0.0.1"}, {"token": SECRET}, {}, "would be readable on the network"),
        (HTTPS, {"token": SECRET}, {"current-context": "gone"}, "has no context 'gone'"),
        (HTTPS, {"token": SECRET}, {"clusters": []}, "has no cluster 'c'"),
        (HTTPS, {"token": [SECRET]}, {}, "Expected `str`, got `array`"),
        (HTTPS, {"tokenFile": "gone"}, {}, "No such file"),
        (HTTPS, {"client-certificate-data": SECRET}, {}, "`client-certificate-data` is not base64"),
        (HTTPS, {"client-certificate-data": encoded(__file__)}, {}, "the certificates can't be used"),
    ],
)
def test_a_kubeconfig_that_can_not_be_used_is_reported_by_field_and_without_its_secrets(tmp_path, cluster, user, top, says):
    with pytest.raises(AccessUnavailable) as raised:
        load_access(write(tmp_path, cluster, user, **top), "", {})
    assert says in str(raised.value)
    assert SECRET not in str(raised.value)


def test_text_that_is_no_yaml_is_not_quoted(tmp_path):
    (tmp_path / "kubeconfig").write_text(f"token: {SECRET}: x: [")
    with pytest.raises(AccessUnavailable, match="it is no YAML") as raised:
        load_access(str(tmp_path / "kubeconfig"), "", {})
    assert SECRET not in str(raised.value)


async def test_outside_a_cluster_and_without_a_kubeconfig_the_problem_names_both():
    answer = await first_answer()
    assert "KUBERNETES_SERVICE_HOST is not set" in answer.problem
    assert "kubeconfig" in answer.problem
