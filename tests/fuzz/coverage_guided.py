"""Coverage-guided fuzzing of the decoders: `python tests/fuzz/coverage_guided.py NAME… [-max_total_time=60]`.

Needs `pip install atheris`; without a name it goes through all decoders, each in a process of its own. It begins with
the decoder's examples and the seeds of `corpus/`, which hold what was found before, and ends with a traceback and the
input when a decoder raises anything but its own errors. The options are those of libFuzzer (`-help=1`), which bound
time (`-timeout`) and memory (`-rss_limit_mb`) of one input.

An input that was found belongs into `corpus/NAME/`, where `test_decoders` gives it to every decoder.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.append(str(Path(__file__).parents[2]))
with atheris.instrument_imports(include=["vllm_pd_connector", "prometheus_client"]):
    from tests.fuzz.decoders import DECODERS

CORPUS = Path(__file__).parent / "corpus"


def fuzz(name: str, options: list[str]) -> None:
    """Does not return."""
    decoder = DECODERS[name]

    def once(content: bytes) -> None:
        try:
            decoder.run(content)
        except decoder.errors:
            return

    grown = tempfile.mkdtemp()  # libFuzzer ends the process, so nothing could remove it
    for number, example in enumerate(decoder.examples):
        (Path(grown) / f"example-{number}").write_bytes(example)
    seeds = [str(CORPUS / name.replace(" ", "_"))] if (CORPUS / name.replace(" ", "_")).is_dir() else []
    atheris.Setup([sys.argv[0], "-timeout=10", "-rss_limit_mb=2048", *options, grown, *seeds], once)
    atheris.Fuzz()


def main() -> None:
    options = [word for word in sys.argv[1:] if word.startswith("-")]
    names = [word for word in sys.argv[1:] if not word.startswith("-")] or list(DECODERS)
    if len(names) == 1:
        fuzz(names[0], options)
    for name in names:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, __file__, name, *options], check=True)


if __name__ == "__main__":
    main()
