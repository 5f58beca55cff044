"""A configuration that changes while the previous change is still being applied."""

import yaml

from din_extproc.edge.registry.catalog_source import CatalogSource
from din_extproc.roles.serve.config_reloader import ConfigReloader
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.support.stack import node, tenant


def text(rpm: int) -> str:
    pool = {"model": "m", "engine": "vllm", "nodes": [node("a", "10.0.0.1:8000")]}
    return yaml.safe_dump({"version": 1, "pools": {"p": pool}, "tenants": [tenant("acme", rpm=rpm)]})


async def test_a_change_that_comes_while_the_one_before_is_put_to_use_is_not_missed(tmp_path):
    file = tmp_path / "din.yaml"
    file.write_text(text(1))
    settings = load(file, {})
    assert isinstance(settings, Settings), str(settings)
    used = []

    async def use(successor: Settings) -> None:
        if not used:
            file.write_text(text(30_000))
        used.append(successor.tenants[0].limits.rpm)

    reloader = ConfigReloader(settings, use, CatalogSource())
    file.write_text(text(200))
    await reloader.reload_if_changed()
    assert used == [200]
    await reloader.reload_if_changed()
    assert used == [200, 30_000]
    assert reloader.settings.tenants[0].limits.rpm == 30_000
