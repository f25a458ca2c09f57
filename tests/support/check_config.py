"""Configurations, and what `vllm-pd check-config` says of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_pd_connector.cli import main
from vllm_pd_connector.cli.output import Exit


def transfer(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": "PDConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}


def several(*connectors: Any) -> dict[str, Any]:
    beside = {"connectors": connectors}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": beside}


def checked(document: object, capsys: pytest.CaptureFixture[str]) -> list[str]:
    code = main(["check-config", json.dumps(document), "--json"])
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert code == (Exit.REFUSED if problems else Exit.OK)
    assert not any("\n" in problem for problem in problems)
    return list(problems)


def noted(document: object, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["check-config", json.dumps(document), "--json"]) == Exit.OK
    return list(json.loads(capsys.readouterr().out)["notes"])
