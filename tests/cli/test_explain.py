"""`vllm-pd explain` and `manifest`: verdicts, movements and exit codes, from files and from live side channels."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator
from json import dumps, loads
from pathlib import Path

import msgspec
import pytest

from tests.support.geometry.world import Model, Side, instance
from vllm_pd_connector.cli import main
from vllm_pd_connector.cli.instances import load
from vllm_pd_connector.cli.output import Exit
from vllm_pd_connector.geometry.manifest import Manifest
from vllm_pd_connector.sidechannel.net.keys import load_keys
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.transport.endpoint import seal

# A token of one layer has 4 KiB: 8 heads, K and V of 128 channels, two bytes each.
MODEL = Model(layers=3, heads=8, key=128, value=128)
NHD = Side(layout="NHD", block_tokens=16, num_blocks=12)


def manifests(engine: str = "p-0", model: Model = MODEL, side: Side = NHD) -> list[Manifest]:
    return [worker.manifest for worker in instance(model, side, engine)]


def long_number() -> bytes:
    """Manifests in JSON with a number that cannot be printed."""
    [one] = loads(msgspec.json.encode(manifests()))
    one["tensors"][0]["offset"] = "here"
    return dumps([one]).replace('"here"', "9" * 4300).encode()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


class Files:
    def __init__(self, directory: Path):
        self.directory = directory

    def __call__(self, name: str, content: object) -> str:
        encode = msgspec.json.encode if name.endswith(".json") else msgspec.msgpack.encode
        (self.directory / name).write_bytes(content if isinstance(content, bytes) else encode(content))
        return str(self.directory / name)


@pytest.fixture
def server() -> Iterator[SideChannelServer]:
    with contextlib.closing(SideChannelServer("127.0.0.1", 0, "p-0", "f" * 32)) as made:
        made.set_manifests([msgspec.msgpack.encode(manifest) for manifest in manifests()])
        yield made


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    code = main(["explain", *arguments, "--json"])
    return code, loads(capsys.readouterr().out)


def test_an_equal_pair_is_allowed_and_moves_directly(files, capsys):
    code, found = explain(capsys, files("a.json", manifests()), files("b.msgpack", manifests("d-0")))
    assert code == 0 and found["status"] == "allow_homogeneous" and found["tokens"] == 176
    [movement] = found["movements"]
    assert not movement["converted"] and movement["copies"] == 0
    assert movement["bytes"] == movement["read_bytes"] == 176 * 4096 * 3
    assert movement["runs"] == 11 * 3, "one per page and layer"


def test_what_a_transport_speaks_is_told_where_it_says_so(files, capsys):
    def over(protocol):
        return [
            msgspec.structs.replace(manifest, transport="mooncake", endpoint=seal("mooncake", "pd-1", b"", protocol))
            for manifest in manifests()
        ]

    fell_back = over("tcp")
    code, found = explain(capsys, files("q", over("rdma") + fell_back), files("e", fell_back))
    assert code and (found["prefill"]["protocol"], found["decode"]["protocol"]) == ("rdma, tcp", "tcp")
    paths = files("p", over("rdma")), files("d", over(""))
    code, found = explain(capsys, *paths)
    assert code == 0 and (found["prefill"]["protocol"], found["decode"]["protocol"]) == ("rdma", "")
    main(["explain", *paths])
    text = capsys.readouterr().out
    assert "mooncake over rdma, " in text and "mooncake, " in text


def test_a_drafter_that_is_not_moved_is_told(files, capsys):
    [made] = manifests("d-0")
    drafter = made.tensors[-1].layer
    facts = msgspec.structs.replace(made.model, speculative="eagle")
    decode = [msgspec.structs.replace(made, model=facts, draft_layers=(drafter,))]
    [plain] = manifests(model=Model(layers=2, heads=8, key=128, value=128))
    plain = msgspec.structs.replace(plain, model=msgspec.structs.replace(plain.model, speculative=""))
    paths = files("p", [plain]), files("d", decode)
    code, found = explain(capsys, *paths)
    says = "1 layer of the drafter is not moved: engine p-0 does not draft"
    assert code == 0 and found["not_moved"] == says and found["movements"][0]["layers"] == 2
    main(["explain", *paths])
    assert says in capsys.readouterr().out.splitlines()
    assert explain(capsys, files("a", manifests()), files("b", manifests("d-0")))[1]["not_moved"] == ""


def test_a_pair_of_other_layouts_names_what_is_converted(files, capsys):
    hnd = Side(layout="HND", tp=2, block_tokens=32, num_blocks=40)
    arguments = files("a", manifests()), files("b", manifests("d-0", side=hnd))
    code, found = explain(capsys, *arguments, "--tokens", "100")
    assert code == 0 and found["status"] == "allow_heterogeneous" and found["tokens"] == 100
    assert [(m["source"], m["destination"]) for m in found["movements"]] == [
        ("pp0 tp0", "pp0 tp0"),
        ("pp0 tp0", "pp0 tp1"),
    ]
    for movement in found["movements"]:
        assert movement["converted"] and movement["layers"] == 3
        assert movement["bytes"] == 100 * 4096 * 3 / 2
        assert movement["read_bytes"] >= movement["bytes"]
        assert movement["runs"] == 3 * 7, "one per layer and page of 16 tokens"
    code, without = explain(capsys, *arguments, "--tokens", "100", "--staging-bytes", "0")
    assert [m["converted"] for m in without["movements"]] == [False, False]
    assert without["movements"][0]["runs"] == 3 * 100 * 4, "one per layer, token and head of the rank"
    assert without["movements"][0]["runs"] == pytest.approx(found["movements"][0]["unconverted_runs"], rel=0.25)


def test_a_push_is_explained_too(files, capsys):
    hnd = Side(layout="HND", tp=2, block_tokens=32, num_blocks=40)
    arguments = files("a", manifests()), files("b", manifests("d-0", side=hnd)), "--tokens", "100", "--mode", "push"
    code, found = explain(capsys, *arguments)
    assert code == 0 and found["mode"] == "push" and len(found["movements"]) == 2
    for movement in found["movements"]:
        assert movement["converted"] and movement["copies"] > 0
        assert movement["bytes"] == movement["read_bytes"] == 100 * 4096 * 3 / 2, "nothing but what was asked for"
        assert movement["runs"] == 3 * (3 + 4), "per layer, one per whole page of 32 tokens, in the last one per head"
    assert main(["explain", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "pushed by prefill" in printed and "bytes written" in printed


def test_states_and_windows_are_explained_too(files, capsys):
    model = Model(layers=3, heads=4, key=20, value=20, states=2)
    code, found = explain(capsys, files("a", manifests(model=model)), files("b", manifests("d-0", model=model)))
    assert code == 0 and {m["kind"] for m in found["movements"]} == {"full", "state"}
    window = Model(layers=3, heads=4, key=20, value=20, window=40)
    _, found = explain(capsys, files("a", manifests(model=window)), files("b", manifests("d-0", model=window)))
    assert found["movements"][0]["bytes"] == 48 * 4 * 80 * 3, "three blocks hold the last 40 tokens"


def test_a_refused_pair_prints_every_difference_and_exits_with_one(files, capsys):
    other = [
        msgspec.structs.replace(m, model=msgspec.structs.replace(m.model, dtype="float16", rope="yarn"))
        for m in manifests("d-0")
    ]
    arguments = files("a", manifests()), files("b", other)
    code, found = explain(capsys, *arguments)
    assert code == 1 and not found["allowed"] and not found["movements"]
    assert {d["field"]: (d["prefill"], d["decode"]) for d in found["differences"]} == {
        "dtype": ("'bfloat16'", "'float16'"),
        "rope": ("'default'", "'yarn'"),
    }
    assert main(["explain", *arguments]) == 1
    printed = capsys.readouterr().out
    assert "verdict: deny" in printed and "--dtype" in printed and "--rope-scaling" in printed


def test_an_instance_without_all_its_ranks_is_named_invalid(files, capsys):
    half = manifests(side=Side(tp=2, num_blocks=12, block_tokens=16))[:1]
    code, found = explain(capsys, files("a", half), files("b", manifests("d-0")))
    assert code == 1 and found["status"] == "invalid_remote" and "incomplete set of workers" in found["reason"]


def test_the_text_says_the_same(files, capsys):
    hnd = Side(layout="HND", block_tokens=16, num_blocks=12)
    assert main(["explain", files("a", manifests()), files("b", manifests("d-0", side=hnd))]) == 0
    printed = capsys.readouterr().out
    assert "engine p-0 (tiny, 1 workers" in printed and "verdict: allow_heterogeneous" in printed
    assert (
        "neighbours" in printed and "converted" in printed and "16 to 16" in printed and "conversion makes" in printed
    )


@pytest.mark.parametrize("engine", ["", "/p-0"])
def test_a_live_side_channel_is_an_instance(server, files, capsys, engine):
    address = f"tcp://127.0.0.1:{server.port}{engine}"
    code, found = explain(capsys, address, files("b", manifests("d-0")))
    assert code == 0 and found["prefill"]["engine_id"] == "p-0"


@pytest.mark.parametrize("name", ["saved.json", "saved.msgpack"])
def test_saved_manifests_are_those_that_were_served(server, tmp_path, capsys, name):
    saved = tmp_path / name
    assert main(["manifest", f"tcp://127.0.0.1:{server.port}", "-o", str(saved)]) == 0
    assert load(str(saved), 1.0) == manifests()
    assert saved.read_bytes().startswith(b"[") == name.endswith("json")
    assert main(["explain", str(saved), str(saved)]) == 0


@pytest.mark.parametrize("json", [False, True])
def test_what_cannot_be_answered_says_why_in_one_line_and_by_its_exit_code(server, files, capsys, json):
    good = files("a", manifests())
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        nobody = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        for bad, code, text in (
            (str(files.directory / "absent"), Exit.UNREADABLE, "No such file"),
            (files("junk", b"\x81\xa1x\x01"), Exit.UNREADABLE, "not manifests of this release"),
            (files("junk.json", b'[{"version": 1}]'), Exit.UNREADABLE, "not manifests of this release"),
            (files("long.json", long_number()), Exit.UNREADABLE, "not manifests of this release"),
            ("a\0b", Exit.UNREADABLE, "null byte"),
            ("tcp://nowhere", Exit.UNREADABLE, "tcp://host:port"),
            ("tcp://127.0.0.1:70000", Exit.UNREADABLE, "tcp://host:port"),
            (f"tcp://127.0.0.1:{server.port}/p-9", Exit.REFUSED, "foreign_engine"),
            (nobody, Exit.UNREACHABLE, "listening there"),
            ("tcp://nohost.invalid:1", Exit.UNREACHABLE, "listening there"),
            ("tcp://no..host:1", Exit.UNREACHABLE, "listening there"),
        ):
            patience = "0.3" if bad == nobody else "20"
            assert failure(capsys, code, "explain", bad, good, "--timeout", patience, json=json).count(text)
    failure(capsys, Exit.UNREADABLE, "manifest", good, "-o", str(files.directory / "no" / "file"), json=json)
    for words in ([good], [nobody, good, "--timeout", "nan"], [good, good, "--tokens", "-1"], [good, good, "--mode=x"]):
        failure(capsys, Exit.USAGE, "explain", *words, json=json)


def failure(capsys: pytest.CaptureFixture[str], code: Exit, command: str, *words: str, json: bool) -> str:
    """The one line that a command ends with."""
    assert main([command, *words, *(["--json"] if json else [])]) == code
    printed = capsys.readouterr()
    if json:
        found = loads(printed.out)
        assert (found["schema"], found["command"], found["error"]["kind"]) == (1, command, code.name.lower())
        assert not printed.err
        return str(found["error"]["message"])
    [line] = printed.err.splitlines()
    assert line.startswith(f"vllm-pd {command}: ") and not printed.out
    return line


def test_keygen_makes_keys_with_which_an_instance_is_asked(tmp_path, capsys):
    for name in ("p", "tool"):
        assert main(["keygen", str(tmp_path / name), "--name", name]) == Exit.OK
    shutil.copy(tmp_path / "tool" / "tool.key", tmp_path / "p")
    shutil.copy(tmp_path / "p" / "p.key", tmp_path / "tool")
    keys = load_keys(tmp_path / "p")
    with contextlib.closing(SideChannelServer("127.0.0.1", 0, "p-0", "f" * 32, keys=keys)) as server:
        server.set_manifests([msgspec.msgpack.encode(manifest) for manifest in manifests()])
        source, out = f"tcp://127.0.0.1:{server.port}", str(tmp_path / "saved.json")
        assert main(["manifest", source, "-o", out, "--keys", str(tmp_path / "tool")]) == Exit.OK
        assert main(["manifest", source, "-o", out, "--timeout", "0.5"]) == Exit.UNREACHABLE
        assert "--keys" in capsys.readouterr().err


def test_which_of_several_servers_is_asked_must_be_said(tmp_path, capsys):
    for name in ("tool", "a", "b"):
        main(["keygen", str(tmp_path / name), "--name", name])
    for name in ("a", "b"):
        shutil.copy(tmp_path / name / f"{name}.key", tmp_path / "tool")
    arguments = ["manifest", "tcp://127.0.0.1:9", "-o", "x", "--timeout", "0.1", "--keys", str(tmp_path / "tool")]
    assert main(arguments) == Exit.UNREADABLE
    assert "--server-key" in capsys.readouterr().err
    assert main([*arguments, "--server-key", str(tmp_path / "tool" / "a.key")]) == Exit.UNREACHABLE
    assert "connection refused" in capsys.readouterr().err
