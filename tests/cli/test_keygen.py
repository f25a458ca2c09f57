"""`vllm-pd keygen`: keys in one directory, all or none of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_pd_connector.cli import main
from vllm_pd_connector.cli.output import Exit
from vllm_pd_connector.sidechannel.net import keys as k


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["keygen", str(tmp_path), "--params-secret", str(tmp_path / "params.secret")]
    assert main(arguments) == Exit.OK
    assert len((tmp_path / "params.secret").read_text().strip()) == 64
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(arguments) == Exit.REFUSED
    assert "already" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/b", "/etc/x", ".hidden", "-x", "a\0b", "a" * 101])
def test_a_name_is_one_of_a_file_in_that_directory(tmp_path: Path, name: str) -> None:
    assert main(["keygen", str(tmp_path / "keys"), f"--name={name}"]) == Exit.REFUSED
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("existing", [False, True])
def test_nothing_is_left_behind_when_the_secret_cannot_be_written(tmp_path: Path, existing: bool) -> None:
    directory = tmp_path / "some" / "keys"
    if existing:
        directory.mkdir(parents=True)
    assert main(["keygen", str(directory), "--params-secret", str(tmp_path / "no" / "secret")]) == Exit.REFUSED
    assert sorted(tmp_path.rglob("*")) == ([directory.parent, directory] if existing else [])


def test_nothing_is_left_behind_when_the_second_key_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half(directory: Path, name: str) -> None:
        (directory / f"{name}.key").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(k.zmq.auth, "create_certificates", half)
    assert main(["keygen", str(tmp_path / "keys")]) == Exit.REFUSED
    assert "No space left" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_secret_is_made_alone_where_keys_are_there_already(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keygen", str(tmp_path / "keys")]) == Exit.OK and capsys.readouterr().out
    assert main(["keygen", "--params-secret", str(tmp_path / "secret"), "--json"]) == Exit.OK
    told = json.loads(capsys.readouterr().out)
    assert (told["public"], told["secret"], told["params_secret"]) == (None, None, str(tmp_path / "secret"))
    assert len((tmp_path / "secret").read_text().strip()) == 64 and len(list((tmp_path / "keys").iterdir())) == 2
    assert main(["keygen"]) == Exit.REFUSED
    assert "nothing to make" in capsys.readouterr().err


def test_json_says_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", str(tmp_path), "--name", "p", "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert Path(found["secret"]).stat().st_mode & 0o077 == 0 and Path(found["public"]).exists()
