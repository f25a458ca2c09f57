"""`vllm-pd bench`: one load on one set-up, or the same on two or more, side by side.

vLLM's own `vllm bench serve` makes the load and measures; here is which words it gets, that nothing but a whole
measurement counts, and the table. Each set-up gets the same prompts, one after the other, and with each run of the
command they are others: an instance would have the caches of those that it was asked before.

Source: vLLM 0.32 and 0.33, `benchmarks/serve.py` (the words, and the keys of the file that `--save-result` writes).
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec
import typer

from vllm_pd_connector.arguments import base_url, seconds
from vllm_pd_connector.cli.options import Json, taken
from vllm_pd_connector.cli.output import (
    CommandError,
    Exit,
    Late,
    NotReached,
    NotReadable,
    emit,
    emit_json,
    printable,
    table,
)
from vllm_pd_connector.instance_info import opened

REPLY_S: Final = 5.0
MAX_RESULT_BYTES: Final = 64 << 20
"""vLLM's file has two numbers of each request, too."""
SAID: Final = 300
"""Letters of the command's own last line that are passed on."""


class Model(msgspec.Struct, frozen=True):
    """One of `/v1/models`: by what requests name it, and where its files are."""

    id: str
    root: str


class _Models(msgspec.Struct, frozen=True):
    data: list[Model]


class Load(msgspec.Struct, frozen=True):
    """What each set-up gets: tokens are those of each request."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    rate: float | None
    at_once: int | None
    seed: int


class Measured(msgspec.Struct, frozen=True):
    """What vLLM's file says of one set-up: times in milliseconds, `duration` in seconds, throughputs per second."""

    duration: float
    completed: int
    failed: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    mean_ttft_ms: float
    p50_ttft_ms: float
    p90_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    p50_tpot_ms: float
    p90_tpot_ms: float
    p99_tpot_ms: float
    mean_e2el_ms: float
    p50_e2el_ms: float
    p90_e2el_ms: float
    p99_e2el_ms: float


ROWS: Final = (
    ("requests/s", "request_throughput"),
    ("answer tokens/s", "output_throughput"),
    *(
        (f"{name}, {part} (ms)", f"{part}_{key}_ms")
        for name, key in (("time to first token", "ttft"), ("time per further token", "tpot"), ("whole answer", "e2el"))
        for part in ("mean", "p50", "p90", "p99")
    ),
)


def setup(text: str) -> tuple[str, str]:
    """The name and the base URL of `[NAME=]URL`; without a name it is called as its URL.

    Raises:
        argparse.ArgumentTypeError: no base URL.
    """
    name, given, url = text.partition("=")
    if not given or "/" in name:
        name, url = "", text
    url = base_url(url)
    return name or url, url


def bench(
    setups: Annotated[
        list[str],
        typer.Argument(parser=taken(setup), metavar="[NAME=]URL...", help="a router, or an instance without P/D"),
    ],
    requests: Annotated[int, typer.Option(min=1, max=1 << 20, help="how many are sent")] = 100,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1 << 24, help="of each")] = 1000,
    answer_tokens: Annotated[int, typer.Option(min=2, max=1 << 24, help="of each")] = 100,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="requests per second; without it all are sent at once")
    ] = None,
    at_once: Annotated[int | None, typer.Option(min=1, max=1 << 20, help="requests in flight at most")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="where the model that the server names is not here")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=(1 << 32) - 1, help="for the prompts of a former run")] = None,
    timeout: Annotated[
        float, typer.Option(parser=taken(seconds), metavar="SECONDS", help="for all requests of one set-up")
    ] = 3600.0,
    command: Annotated[str, typer.Option(metavar="FILE", help="vLLM's command")] = "vllm",
    json: Json = False,
) -> Exit:
    """Measure a load on one set-up, or on several to compare them (vllm bench serve)."""
    named: list[tuple[str, str]] = list(map(tuple, setups))  # type: ignore[arg-type]  # what the parser made of them
    if len({name for name, _ in named}) < len(named):
        raise typer.BadParameter("two set-ups have one name; give NAME=URL")
    program = _program(command)
    models = [_model(url) for _, url in named]
    chosen = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    load = Load(requests, prompt_tokens, answer_tokens, rate, at_once, chosen)
    words = [
        program, "bench", "serve", "--dataset-name", "random", "--num-prompts", str(requests), "--seed", str(chosen),
        "--random-input-len", str(prompt_tokens), "--random-output-len", str(answer_tokens),
        "--request-rate", "inf" if rate is None else str(rate), "--temperature", "0", "--disable-tqdm",
        "--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,90,99",
        *(("--max-concurrency", str(at_once)) if at_once is not None else ()),
        *(("--tokenizer", tokenizer) if tokenizer is not None else ()),
    ]  # fmt: skip
    with _sigterm_raises():
        found = [
            (name, url, measure(url, [*words, "--model", one.root, "--served-model-name", one.id], load, timeout))
            for (name, url), one in zip(named, models, strict=True)
        ]
    if json:
        rows = [{"name": name, "url": url, **msgspec.structs.asdict(one)} for name, url, one in found]
        emit_json("bench", {"load": msgspec.structs.asdict(load), "setups": rows})
    else:
        emit("\n".join(table(lines({name: one for name, _, one in found}))))
    return Exit.OK


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Have SIGTERM leave by an exception, as SIGINT does: what was started is ended by it, and sends no more."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def measure(url: str, words: list[str], load: Load, timeout: float) -> Measured:
    """Have vLLM measure one set-up. It counts an answer that breaks off behind its first token as a good one, so the
    tokens are counted, too: its random prompts are answered whole, whatever the model would end at.

    Raises:
        CommandError: the measurement failed, or a request of it did.
        Late: it took longer than `timeout` seconds.
        NotReadable: what it left is no measurement.
    """
    with tempfile.TemporaryDirectory() as directory:
        said, result = Path(directory) / "said", Path(directory) / "result.json"
        kept = ["--save-result", "--result-dir", directory, "--result-filename", result.name]
        with said.open("wb") as output:
            try:
                ended = subprocess.run(
                    [*words, "--base-url", url, *kept],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(url),
                    timeout=timeout,
                )
            except subprocess.TimeoutExpired as error:
                raise Late(f"{url} is not measured after {timeout:g} s: send less, or raise --timeout") from error
            except OSError as error:
                raise NotReadable(f"{words[0]}: {error.strerror}") from error
        if ended.returncode:
            last = _last_line(said)
            raise CommandError(f"{url}: vllm bench serve ended with status {ended.returncode}: {last}")
        found = _read(result, url)
    requests, tokens = load.requests, load.requests * load.answer_tokens
    if found.failed or found.completed != requests:
        raise CommandError(
            f"{url}: {found.completed} of {requests} requests were answered, so nothing is compared; its log says why"
        )
    if found.total_output_tokens < tokens:
        raise CommandError(
            f"{url}: {found.total_output_tokens} of {tokens} tokens were answered: answers broke off, so nothing is "
            "compared; its log says why"
        )
    return found


def _read(result: Path, url: str) -> Measured:
    try:
        with result.open("rb") as file:
            content = file.read(MAX_RESULT_BYTES + 1)
        if len(content) > MAX_RESULT_BYTES:
            raise NotReadable(f"{url}: vllm bench serve left more than {MAX_RESULT_BYTES} bytes of result")
        return msgspec.json.decode(content, type=Measured)
    except OSError as error:
        raise NotReadable(f"{url}: vllm bench serve left no result: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotReadable(
            f"{url}: vllm bench serve left a result without what is measured: {error}; is it vLLM 0.32 or later?"
        ) from error


def lines(found: dict[str, Measured]) -> list[tuple[str, ...]]:
    """The table: a row for each figure, a column for each set-up, and how many times the first's the others' are."""
    names = list(found)
    first = found[names[0]]
    rows = [("", *names, *(f"{name} / {names[0]}" for name in names[1:]))]
    for label, key in ROWS:
        values = [getattr(one, key) for one in found.values()]
        of = getattr(first, key)
        rows.append((label, *(f"{one:.4g}" for one in values), *(_ratio(one, of) for one in values[1:])))
    return rows


def _ratio(value: float, of: float) -> str:
    return f"{value / of:.2f}" if of > 0 else "-"


def _program(command: str) -> str:
    """vLLM's command: the one of this environment, or the first that PATH has.

    Raises:
        NotReadable: neither.
    """
    found = shutil.which(command, path=str(Path(sys.executable).parent)) or shutil.which(command)
    if found is None:
        raise NotReadable(f"{command} is not installed here: run it where vLLM is, or give its --command")
    return found


def _environment(url: str) -> dict[str, str]:
    """The command's: it takes a key from another variable than vLLM's servers do, and would send its load by way of a
    proxy that this environment has for the internet. A tokenizer may come by way of that."""
    key, direct = os.environ.get("VLLM_API_KEY"), os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    direct = ",".join(filter(None, (direct, urlsplit(url).hostname)))
    return {**os.environ, "no_proxy": direct, "NO_PROXY": direct, **({"OPENAI_API_KEY": key} if key else {})}


def _model(url: str) -> Model:
    """The first model that is named there. vLLM's command would wait for one for a long time, and ask without a key.

    Raises:
        NotReached: nobody there names one.
    """
    where, key = f"{url}/v1/models", os.environ.get("VLLM_API_KEY")
    question = urllib.request.Request(where, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with opened(question, timeout=REPLY_S) as answer:
            return msgspec.json.decode(answer.read(MAX_RESULT_BYTES), type=_Models).data[0]
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
        raise NotReached(f"{where}: no model is named there: {error}") from error
    except urllib.error.HTTPError as error:
        with error:
            why = "set VLLM_API_KEY" if error.code == 401 else "give the URL of a router or an instance"
            raise NotReached(f"{where}: HTTP {error.code}; {why}") from error
    except urllib.error.URLError as error:
        raise NotReached(f"{where}: {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise NotReached(f"{where}: {error or type(error).__name__}") from error


def _last_line(said: Path) -> str:
    told = [line.strip() for line in said.read_text(errors="replace").splitlines() if line.strip()]
    return printable(told[-1])[:SAID] if told else "it said nothing"
