"""Hot restart: a configuration that can't be read starts no Envoy and stops none."""

import pytest

from din_extproc.domain.node import Endpoint
from din_extproc.roles.operate.envoy import EnvoyOptions, HotRestarter


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
async def test_a_configuration_that_cannot_be_read_ends_with_a_line_and_1(tmp_path, caplog, content):
    file = tmp_path / "envoy.yaml"
    if content is not None:
        file.write_bytes(content)
    line = HotRestarter(EnvoyOptions(file=file, admin=Endpoint("127.0.0.1", 1)), tmp_path / "envoy", tmp_path)
    assert await line.run() == 1
    assert [record.getMessage().startswith(f"can't read {file}: ") for record in caplog.records] == [True]
