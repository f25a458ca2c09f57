"""The commands that the documentation shows are ones that the programs take; none of them is run."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import time
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from examples.roles import CPU_ENVIRONMENT, CPU_FLAGS, cache_flags
from vllm_pd_connector.cli.app import app
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.instance_info import ROLES
from vllm_pd_connector.proxy.serve import add_arguments, options_of
from vllm_pd_connector.sidechannel.net.keys import create_keys

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "vllm_pd_connector/proxy/README.md",
    *(str(path.relative_to(ROOT)) for folder in ("", "engines", "recipes")
      for path in sorted((ROOT / "docs" / folder).glob("*.md"))),
)  # fmt: skip
SYNOPSIS, _, _ = (ROOT / "docs" / "cli.md").read_text().partition("\n## ")
OF_MANY = {"--help", "--json", "--keys", "--server-key"}
"""Options that a page of commands has in its text, and not in the line of each."""
PROMPT = re.compile(r"^([0-9.]+\$|CUDA_VISIBLE_DEVICES=\S+) ")
OURS = re.compile(r"examples/launch\S+|vllm serve |vllm-pd ")
GPUS = ("--gpus", ",".join(map(str, range(16))))


def commands() -> list[list[str]]:
    """The words of every command of ours in the indented blocks; backslashes and quotes join lines."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", (ROOT / page).read_text().removeprefix(SYNOPSIS))
        lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
        while lines:
            command = PROMPT.sub("", lines.pop(0))
            if OURS.match(command):
                while command.count("'") % 2:
                    command += lines.pop(0)
                words = shlex.split(command, comments=True)
                found.append(words[: words.index("&&")] if "&&" in words else words)
    return found


COMMANDS = commands()


def of(program: str) -> list[list[str]]:
    chosen = [words for words in COMMANDS if " ".join(words).startswith(program)]
    assert chosen
    return chosen


def started(words: list[str]) -> list[list[str]]:
    """The commands that the launcher would start, on a machine with many GPUs."""
    options = words[1:] if {"--gpus", "router"} & set(words) else [*words[1:], *GPUS]
    done = subprocess.run([ROOT / words[0], "--dry-run", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line.partition(":")[2]) for line in done.stdout.splitlines()]


def check_serve(words: list[str]) -> None:
    """What `vllm serve` is told about the connector."""
    if "--kv-transfer-config" in words:
        transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
        if transfer["kv_connector"] == "MultiConnector":
            transfer = transfer["kv_connector_extra_config"]["connectors"][0]
        assert transfer["kv_connector"] == "PDConnector" and transfer["kv_role"] in ROLES
        parse_config(transfer.get("kv_connector_extra_config", {}))


@cache
def serve_parser() -> argparse.ArgumentParser:
    """vLLM's own parser of `vllm serve`. 0.33 moved the module that defines it, but not the command that uses it."""
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = serve.make_arg_parser(FlexibleArgumentParser())
    return parser


def check_router(words: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    options = options_of(parser.parse_args(words))
    assert options.instances or (options.prefill and options.decode)


@pytest.mark.parametrize("words", of("examples/"), ids=" ".join)
def test_a_launch_command_starts_what_the_programs_take(words: list[str]) -> None:
    for command in started(words):
        if "vllm-pd" in command:
            check_router(command[command.index("proxy") + 1 :])
        else:
            check_serve(command)


@pytest.mark.parametrize("words", of("vllm-pd"), ids=" ".join)
def test_a_command_of_ours_is_taken(words: list[str]) -> None:
    if words[1] == "proxy":
        check_router(words[2:])
    else:
        command = get_command(app).commands[words[1]]
        command.make_context(words[1], words[2:])


def test_a_line_for_each_command_of_ours_has_its_options() -> None:
    joined = re.sub(r"\\\n\s*", "", SYNOPSIS)
    lines = dict(re.findall(r"^    vllm-pd (\S+)(.*)$", joined, re.MULTILINE))
    commands = get_command(app).commands
    assert set(lines) == set(commands)
    for name in set(commands) - {"proxy"}:  # whose manual is the router's page
        shown = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", lines[name]))
        options = [set(one.opts) for one in commands[name].params if one.param_type_name == "option"]
        assert [each for each in options if not each & (shown | OF_MANY)] == [], name
        assert shown <= set().union(*options), name


@pytest.mark.parametrize("words", of("vllm "), ids=" ".join)
def test_vllm_and_the_connector_take_a_command(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_serve(words)
    make_keys(words, tmp_path)
    monkeypatch.chdir(tmp_path)
    serve_parser().parse_args([word.replace("/etc/pd", str(tmp_path)) for word in words[2:]])  # exits at a wrong flag


def make_keys(words: list[str], directory: Path) -> None:
    """The connector looks for its keys as soon as vLLM has read its configuration."""
    if '"side_channel_keys"' in " ".join(words):
        create_keys(directory / "keys", "instance")


def test_the_image_without_a_gpu_is_run_as_the_launcher_runs_instances() -> None:
    text = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "containers.md").read_text())
    image = "vllm-pd:0.32-cpu"
    runs = [shlex.split(line) for line in text.splitlines() if re.match(rf"    docker run .* {image} ", line)]
    prefill, decode, router = [(words[: words.index(image)], words[words.index(image) + 1 :]) for words in runs]
    for (options, serve), role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        given = {after for before, after in pairwise(options) if before == "-e"}
        in_image = {"TORCH_COMPILE_DISABLE=1"}  # by ENV
        assert given | in_image == {f"{name}={value}" for name, value in CPU_ENVIRONMENT.items()}
        assert {*CPU_FLAGS, *cache_flags()} <= set(serve)
        assert json.loads(serve[serve.index("--kv-transfer-config") + 1])["kv_role"] == role
        check_serve(serve)
        serve_parser().parse_args(serve[2:])
    check_router(router[1][2:])


CURL = """#!/bin/sh
while [ ! -e {go} ]; do sleep 0.05; done
printf '%s\\n' "$@" > {told}.part && mv {told}.part {told}
"""


def test_the_hook_that_tells_the_router_holds_nobody_up(tmp_path: Path) -> None:
    """Whoever runs a hook waits until nobody has its output any more."""
    _, _, section = (ROOT / "docs" / "elastic.md").read_text().partition("## Kubernetes\n")
    block = [line[4:] for line in section.partition("\n\n")[0].splitlines()]
    [*_, script] = yaml.safe_load("\n".join(block))["lifecycle"]["postStart"]["exec"]["command"]
    go, told = tmp_path / "go", tmp_path / "told"
    (tmp_path / "curl").write_text(CURL.format(go=go, told=told))
    (tmp_path / "curl").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "POD_IP": "10.1.2.3"}
    try:
        subprocess.run(["sh", "-c", script], env=environment, capture_output=True, check=True, timeout=30)
    finally:
        go.touch()
    until = time.monotonic() + 30
    while not told.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    words = told.read_text().splitlines()
    assert '{"url": "http://10.1.2.3:8000"}' in words
    assert words[:2] == ["--noproxy", "*"], "a proxy of the environment knows nothing of the cluster's names"


def test_a_recipe_is_for_a_prefill_a_decode_instance_and_a_router() -> None:
    recipes = sorted((ROOT / "docs" / "recipes").glob("*.md"))
    index = (ROOT / "docs" / "recipes" / "index.md").read_text()
    assert len(recipes) > 5
    for recipe in recipes:
        if recipe.name != "index.md":
            text = recipe.read_text()
            assert (
                re.findall(r'"kv_role": "(\w+)"', text) == ["kv_producer", "kv_consumer"]
                and "vllm-pd proxy" in text
                and "Not seen:" in text
            )
            assert f"]({recipe.name})" in index


def test_the_quickstart_has_both_transports_and_both_modes_for_one_pair_and_for_many() -> None:
    shown = {
        ("many" if {"--prefills", "--decodes"} & set(words) else "one", *(extra[key] for key in ("transport", "mode")))
        for words in of("examples/")
        for command in started(words)
        if "--kv-transfer-config" in command
        for extra in [json.loads(command[command.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]]
    }
    assert {("one", t, m) for t in ("nixl", "mooncake") for m in ("pull", "push")} <= shown
    assert {("many", "nixl", "pull"), ("many", "mooncake", "push")} <= shown
