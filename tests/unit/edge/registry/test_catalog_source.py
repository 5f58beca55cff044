"""A catalogue behind a URL: pulled once, asked again with its ETag, kept while its source fails."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from din_extproc.edge.registry.catalog_source import CatalogSource, CatalogUnavailable
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from tests.support.stack import tenant

TEXT = '{"models": [{"model_name": "m", "model_version": "1.0", "dtype": "bf16", "max_seq_len": 4096}]}'
OTHER = TEXT.replace("4096", "2048")


class Source:
    """An HTTP server that answers with `text` under `etag`, or with `status`."""

    def __init__(self) -> None:
        self.text, self.etag, self.status = TEXT, '"1"', 200
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.headers.get("if-none-match", "")
                outer.asked.append(known)
                status = 304 if outer.status == 200 and known == outer.etag else outer.status
                self.send_response(status)
                self.send_header("etag", outer.etag)
                self.end_headers()
                if status == 200:
                    self.wfile.write(outer.text.encode("latin-1"))

            def log_message(self, *_) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/models.json"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def source() -> Iterator[Source]:
    running = Source()
    yield running
    running.stop()


def test_it_is_pulled_once_and_asked_again_with_its_etag(source):
    pulled = CatalogSource()
    assert [pulled.read(source.url) for _ in range(3)] == [TEXT] * 3
    assert not pulled.changed(source.url)
    source.text, source.etag = OTHER, '"2"'
    assert pulled.changed(source.url)
    assert pulled.read(source.url) == OTHER
    assert source.asked == ["", '"1"', '"1"']


@pytest.mark.parametrize(
    ("field", "value"), [("status", 500), ("status", 404), ("text", "<html>"), ("text", '{"models": 1}'), ("text", '{"models": ["\xff"]}')]
)
def test_the_last_good_text_stays_while_the_source_fails(source, field, value, caplog):
    pulled = CatalogSource()
    pulled.read(source.url)
    setattr(source, field, value)
    source.etag = '"2"'
    assert [pulled.changed(source.url) for _ in range(3)] == [False] * 3
    assert pulled.read(source.url) == TEXT
    assert len(caplog.records) == 1, "logged once"


def test_a_source_that_never_answered_is_a_problem_at_its_line(source, tmp_path):
    config = tmp_path / "din.yaml"
    pool = "{ model: m, engine: vllm, nodes: [{ id: n, address: '10.0.0.1:8000' }] }"
    key = tenant("acme")["keys"][0]
    who = f"[{{ id: acme, models: ['*'], keys: [{{ id: acme, hash: \"{key['hash']}\" }}] }}]"
    config.write_text(f"version: 1\ncatalog: {{ source: '{source.url}', refresh_s: 5 }}\npools: {{ p: {pool} }}\ntenants: {who}\n")
    settings = load(config, {})
    assert not isinstance(settings, ConfigRejected), settings
    assert settings.catalog_url == source.url
    assert settings.files == (str(config),)
    assert settings.pools[0].nodes[0].max_seq_len == 4096
    source.status = 503
    refused = load(config, {})
    assert isinstance(refused, ConfigRejected)
    assert (refused.problems[0].line, refused.problems[0].path) == (2, "catalog.source")
    assert "503" in refused.problems[0].message
    with pytest.raises(CatalogUnavailable):
        CatalogSource().read(source.url)
