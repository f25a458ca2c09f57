"""What a release hands out: a source distribution and a wheel made from it, installed from the file.

Into empty environments, with what they need from the package index. They do not see the checkout's package: programs
are run elsewhere, and say from where they import.
"""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.servers.pairs import ROOT

pytestmark = pytest.mark.e2e

SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "vllm_pd_connector")
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
@pytest.mark.parametrize("extra", ["nixl", "mooncake", "mooncake-cuda13", "mooncake-non-cuda", "ray"])
def test_every_extra_is_found(extra: str, built: dict[str, Path], tmp_path: Path) -> None:
    """Resolved for an empty environment, not installed: gigabytes of CUDA libraries would come with them."""
    python = environment(tmp_path / "env")
    run(str(python), "-m", "pip", "install", "--quiet", "--dry-run", f"{built['wheel']}[{extra}]")
