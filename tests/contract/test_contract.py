"""PDConnector fits the connector interface of every vLLM version that the package says it supports."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from tests.contract.describe_vllm import describe, imported_names
from vllm_pd_connector import plugin
from vllm_pd_connector.connector import PDConnector

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "design" / "contract.md"
RECORDS = {path.stem.removeprefix("vllm-"): json.loads(path.read_text()) for path in HERE.glob("vllm-*.json")}
BASES = ("KVConnectorBase_V1", "SupportsHMA")


def test_both_supported_versions_are_recorded():
    assert set(RECORDS) == {"0.32.0", "0.33.0"}


@pytest.mark.parametrize("version", RECORDS)
@pytest.mark.parametrize("base", BASES)
def test_every_override_takes_what_vllm_passes(version, base):
    for name, method in RECORDS[version]["classes"][base].items():
        ours = vars(PDConnector).get(name)
        if ours is None or isinstance(ours, property):
            continue
        function = ours.__func__ if isinstance(ours, classmethod) else ours
        parameters = inspect.signature(function).parameters
        wild = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        theirs = [parameter for parameter, kind, _ in method["parameters"] if kind in ("positional", "keyword")]
        missing = [parameter for parameter in theirs if parameter not in parameters and not wild]
        assert not missing, f"{version} {base}.{name} passes {missing}, which ours does not take"
        known = {parameter for parameter, *_ in method["parameters"]}
        surplus = [p.name for p in parameters.values() if p.default is p.empty and p.name not in known]
        surplus = [p for p in surplus if parameters[p].kind not in (inspect.Parameter.VAR_KEYWORD,)]
        assert not surplus, f"{version} {base}.{name} does not pass {surplus}, which ours needs"
        decorated = "classmethod" in method["decorators"]
        assert isinstance(ours, classmethod) == decorated, f"{version} {base}.{name}: classmethod on one side only"


@pytest.mark.parametrize("version", RECORDS)
def test_every_abstract_method_is_implemented(version):
    abstract = {
        name
        for base in BASES
        for name, method in RECORDS[version]["classes"][base].items()
        if "abstractmethod" in method["decorators"]
    }
    assert abstract and not abstract - set(vars(PDConnector))


@pytest.mark.parametrize("version", RECORDS)
@pytest.mark.parametrize("base", BASES)
def test_every_default_that_is_inherited_was_looked_at(version, base):
    """vLLM, or its MultiConnector, may call any of them; contract.md says why each default is right."""
    _, _, reasons = PAGE.read_text().partition("## Defaults that we inherit")
    inherited = set(RECORDS[version]["classes"][base]) - set(vars(PDConnector))
    missing = sorted(name for name in inherited if f"`{name}`" not in reasons.partition("\n## ")[0])
    assert not missing, f"{version} {base}: neither overridden nor named in {PAGE.name}: {missing}"
    rows = re.findall(r"^\| (`.*?) \|", reasons.partition("\n## ")[0], re.MULTILINE)
    named = {name for row in rows for name in row.split("`")}
    assert not (both := named & set(vars(PDConnector))), f"{PAGE.name} calls inherited what is overridden: {both}"


@pytest.mark.parametrize("version", RECORDS)
def test_every_name_that_compat_imports_exists(version):
    missing = [
        f"{module}.{name}"
        for module, names in RECORDS[version]["names"].items()
        for name, there in names.items()
        if not there
    ]
    assert not missing
    assert set(imported_names()) == set(RECORDS[version]["names"]), "record the descriptions anew"


def test_the_installed_vllm_is_as_recorded():
    vllm = importlib.import_module("vllm")
    record = RECORDS[vllm.__version__.split("+")[0]]
    found = describe(Path(vllm.__file__).parent)
    assert found["classes"] == record["classes"]
    assert found["names"] == record["names"]


def test_the_plugin_registers_the_class_under_its_own_name_and_twice_is_once():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("PDConnector") is PDConnector


def test_a_module_path_finds_the_class_without_the_plugin():
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = KVTransferConfig(
        kv_connector="PDConnector", kv_connector_module_path=plugin.CONNECTOR_MODULE, kv_role="kv_consumer"
    )
    assert KVConnectorFactory.get_connector_class(config) is PDConnector
