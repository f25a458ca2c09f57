"""An overlay has a release's Python and the installed build's compiled modules; what cannot be had says what to do."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from tests.support.servers import releases
from tools import vllm_overlay
from tools.vllm_overlay import OverlayError, overlay

WHEEL = "vllm-9.9.0-py3-none-any.whl"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiled build beside a package index that is not there, and a cache of its own."""
    package = tmp_path / "site-packages" / "vllm"
    (package / "inner").mkdir(parents=True)
    for name in ("_C.abi3.so", "inner/more.so"):
        (package / name).write_text("compiled for this processor")
    cache = tmp_path / "cache"
    monkeypatch.setattr(vllm_overlay, "_installed", lambda: package)
    monkeypatch.setattr(vllm_overlay, "CACHE", cache)
    monkeypatch.setattr(vllm_overlay, "WHEEL_DIRECTORY", cache / "wheels")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return package


@pytest.fixture
def wheel(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A release's wheel that somebody has put where it is looked for."""
    path = vllm_overlay.WHEEL_DIRECTORY / WHEEL
    path.parent.mkdir(parents=True)
    files = {
        "vllm/__init__.py": "release = 9.9",
        "vllm/inner/__init__.py": "",
        "vllm/_C.abi3.so": "compiled for another processor",
        "vllm/only_cuda.so": "",
        "vllm-9.9.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.0\n",
        "vllm-9.9.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(vllm_overlay, "WHEELS", {"9.9": ("9.9.0", sha256)})
    return path


def compiled(made: Path) -> dict[str, Path]:
    return {str(link.relative_to(made / "vllm")): link.readlink() for link in made.rglob("*.so")}


def test_an_overlay_is_the_releases_python_over_the_installed_compiled_modules(wheel: Path, installed: Path) -> None:
    made = overlay("9.9")
    assert (made / "vllm" / "__init__.py").read_text() == "release = 9.9"
    assert compiled(made) == {name: installed / name for name in ("_C.abi3.so", "inner/more.so")}
    assert "Version: 9.9.0+cpu\n" in (made / "vllm-9.9.0+cpu.dist-info" / "METADATA").read_text()
    wheel.unlink()
    (installed / "_C.abi3.so").rename(installed / "_C_new.abi3.so")
    assert overlay("9.9") == made, "it is made once"
    assert compiled(made) == {name: installed / name for name in ("_C_new.abi3.so", "inner/more.so")}


def test_a_wheel_with_another_hash_makes_no_overlay(wheel: Path) -> None:
    with wheel.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(OverlayError, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        overlay("9.9")
    assert not (vllm_overlay.CACHE / "9.9.0").exists()


def test_where_no_wheel_can_be_had_it_says_which_and_where_to_put_it(installed: Path) -> None:
    version, sha256 = vllm_overlay.WHEELS["0.33"]
    with pytest.raises(OverlayError) as refused:
        overlay("0.33")
    assert [
        word for word in (version, sha256, str(vllm_overlay.WHEEL_DIRECTORY)) if word not in str(refused.value)
    ] == []


def test_a_server_gets_the_release_of_its_side_and_what_else_the_tests_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "overlay", lambda release: vllm_overlay.CACHE / f"{release}.0")
    monkeypatch.setenv("PYTHONPATH", f"{vllm_overlay.CACHE / '0.33.0'}:/plugins")
    path = releases.python_path.__wrapped__
    assert path(releases.INSTALLED) == "/plugins"
    assert path("0.34") == f"{vllm_overlay.CACHE / '0.34.0'}:/plugins"
