"""What a release hands out: a source distribution and a wheel made from it, installed from the file.

Into empty environments, with what they need from the package index. They do not see the checkout's package: programs
are run elsewhere, and say from where they import. The quickstart and the extras are run in the environment that the
image without a GPU has.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from examples.launch import Spec, post
from tests.support.ports import free_ports
from tests.support.servers.pairs import ROOT, Pairs

pytestmark = pytest.mark.e2e

SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "vllm_pd_connector")
FIRST_START_S = 960.0
"""Longer than the launcher waits for its instances, so that it tells what they did. In a new environment no module is
compiled yet."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two files. Built from a copy, so that nothing else lies beside the sources."""
    clone, dist = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, clone)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(clone))
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def run(*command: str, where: Path | None = None) -> str:
    done = subprocess.run(command, cwd=where, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


def environment(directory: Path) -> Path:
    """A new environment's interpreter."""
    run(sys.executable, "-m", "venv", str(directory))
    return directory / "bin" / "python"


def test_both_files_hold_what_a_user_needs_and_nothing_else(built: dict[str, Path]) -> None:
    wheel = set(zipfile.ZipFile(built["wheel"]).namelist())
    with tarfile.open(built["sdist"]) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_pd_connector").rglob("*.py")}
    also = {"vllm_pd_connector/py.typed", "vllm_pd_connector/proxy/README.md"}
    assert {name for name in wheel if ".dist-info/" not in name} == package | also
    assert package | also | {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= sdist
    assert not [name for name in sdist if name.startswith(("tests", "out", "."))]


def test_the_wheel_says_what_an_index_shows(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        told = email.message_from_string(wheel.read(name).decode())
    assert told["License-Expression"] == "Apache-2.0" and told["Requires-Python"] == ">=3.11"
    assert {"nixl", "mooncake", "proxy", "ray", "vllm"} <= set(told.get_all("Provides-Extra") or ())
    kinds = {line.partition(" :: ")[0] for line in told.get_all("Classifier") or ()}
    assert {"Development Status", "Operating System", "Programming Language", "Topic", "Typing"} <= kinds
    assert told["Description-Content-Type"] == "text/markdown"
    assert str(told.get_payload()).startswith("# vllm_pd_connector")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_file_installs_into_an_empty_environment(kind: str, built: dict[str, Path], tmp_path: Path) -> None:
    """With the extra of the router, which needs no vLLM; its other dependencies come from the package index."""
    python = environment(tmp_path / "env")
    run(str(python), "-m", "pip", "install", "--quiet", f"{built[kind]}[proxy]")
    where = run(str(python), "-c", "import vllm_pd_connector as p; print(p.__file__)", where=tmp_path)
    assert Path(where).is_relative_to(tmp_path / "env")
    command = str(python.with_name("vllm-pd"))
    run(command, "keygen", "keys", where=tmp_path)
    assert (tmp_path / "keys" / "instance.key_secret").exists()
    assert "--instance" in run(command, "proxy", "--help", where=tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "extra", ["vllm", "nixl", "mooncake", "mooncake-cuda13", "mooncake-non-cuda", "ray", "accuracy"]
)
def test_every_extra_is_found(extra: str, built: dict[str, Path], tmp_path: Path) -> None:
    """Resolved for an empty environment, not installed: gigabytes of CUDA libraries would come with them."""
    python = environment(tmp_path / "env")
    run(str(python), "-m", "pip", "install", "--quiet", "--dry-run", f"{built['wheel']}[{extra}]")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The environment that docker/Dockerfile.cpu makes, by its COPY lines and its set-up in an empty directory.

    The image's base, its user and apt's lists are not there. Below it lie some GB, for as long as this module runs. The
    set-up took 12 minutes on two cores that other work wanted, too.
    """
    directory = tmp_path_factory.mktemp("image")
    lines = (ROOT / "docker" / "Dockerfile.cpu").read_text().replace("\\\n", " ").splitlines()
    try:
        for line in lines:
            instruction, _, rest = line.partition(" ")
            if instruction == "COPY":
                *sources, into = rest.split()
                copy([ROOT / source for source in sources], directory / into)
            elif instruction == "RUN":
                [setup] = [part for part in rest.split("&&") if "tools/setup_env.py" in part]
                run("sh", "-c", setup.replace("python ", f"{sys.executable} "), where=directory)
        yield directory / ".venv" / "bin"
    finally:
        shutil.rmtree(directory)


def copy(sources: Sequence[Path], into: Path) -> None:
    """As COPY does: a directory's content, or files into a directory."""
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, into, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, into)


@pytest.mark.matrix
def test_the_quickstart_runs_from_the_wheel(image: Path, built: dict[str, Path], tmp_path: Path, pairs: Pairs) -> None:
    """In an environment that has vLLM and nothing of this project but the wheel: a launcher, a request, the metrics."""
    python = str(image / "python")
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "vllm-pd-connector")
    run(python, "-m", "pip", "install", "--quiet", f"{built['wheel']}[nixl,proxy]")
    where = run(python, "-c", "import vllm_pd_connector as p; print(p.__file__)", where=tmp_path)
    assert Path(where).is_relative_to(image.parent / "lib")
    run(python, str(ROOT / "examples" / "make_models.py"), "--into", str(tmp_path), "gqa")
    base = free_ports((0, 10, 20, 30, 50))
    ports = {"--port": base, "--prefill-port": base + 10, "--decode-port": base + 20, "--side-channel-port": base + 30}
    spec = Spec(
        "quickstart",
        (
            *(python, str(ROOT / "examples" / "launch_pd.py"), "--cpu", "--model", str(tmp_path / "gqa")),
            *("--logs", str(pairs.servers.logs / "quickstart")),
            *(word for option, port in ports.items() for word in (option, str(port))),
        ),
        base,
        {"PYTHONPATH": "", "PATH": os.pathsep.join([str(image), "/usr/bin", "/bin"])},
    )
    [launcher] = pairs.servers.start(spec, timeout=FIRST_START_S)
    try:
        body = {"model": str(tmp_path / "gqa"), "prompt": "San Francisco is", "max_tokens": 16, "temperature": 0}
        answer = post(f"{launcher.url}/v1/completions", body)
        assert answer["usage"]["completion_tokens"] > 0
        with urllib.request.urlopen(f"http://127.0.0.1:{base + 20}/metrics") as metrics:
            received = re.findall(r"^vllm:pd_received_bytes_total\S* (\S+)$", metrics.read().decode(), re.MULTILINE)
        assert sum(map(float, received)) > 0, "the cache came from prefill"
    finally:
        pairs.servers.stop(launcher)
    assert "ready" in launcher.log.read_text()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("extra", "module"),
    [("mooncake-non-cuda", "mooncake.engine"), ("ray", "vllm_pd_connector.integrations.ray"), ("accuracy", "lm_eval")],
)
def test_an_extra_installs_beside_vllm(extra: str, module: str, image: Path, built: dict[str, Path]) -> None:
    """Really, since what these share is there already; each leaves vLLM's own requirements as they were."""
    python = str(image / "python")
    run(python, "-m", "pip", "install", "--quiet", f"{built['wheel']}[{extra}]")
    run(python, "-c", f"import {module}", where=image)
