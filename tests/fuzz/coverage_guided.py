"""Coverage-guided fuzzing of one decoder: `python tests/fuzz/coverage_guided.py NAME [CORPUS] [-max_total_time=60]`.

Needs `pip install atheris`. Ends with a traceback and the input when a decoder raises anything but its own errors; the
options are those of libFuzzer (`-help=1`), which bound time (`-timeout`) and memory (`-rss_limit_mb`) of one input.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["vllm_pd_connector"]):
    from fuzz.decoders import DECODERS


def main() -> None:
    name, *options = sys.argv[1:]
    decoder = DECODERS[name]

    def once(content: bytes) -> None:
        try:
            decoder.run(content)
        except decoder.errors:
            return

    if not options or options[0].startswith("-"):
        corpus = tempfile.mkdtemp()
        options.insert(0, corpus)
    for number, example in enumerate(decoder.examples):
        (Path(options[0]) / f"example-{number}").write_bytes(example)
    atheris.Setup([sys.argv[0], "-timeout=10", "-rss_limit_mb=2048", *options], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
