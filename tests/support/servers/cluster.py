"""One running pair with its router, the plain run's answers, and what must hold after every test.

At most one pair runs at a time, so tests of one row must be neighbours (see `conftest`). The plain instance runs only
while it computes the answers of its family; they are kept on disk, keyed by everything that they depend on.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.launch import CPU_FLAGS, Server, Servers, router_spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.ports import free_port
from tests.support.servers import digests
from tests.support.servers.agreement import disagreement, parting_step, rest_of
from tests.support.servers.engine import rounds_to_bfloat16
from tests.support.servers.events import announcing
from tests.support.servers.matrix import (
    BESIDE_ROWS,
    DRAFT_ROWS,
    EVENT_ROWS,
    ORDER_ROWS,
    OTHER_WAY_ROWS,
    PLAIN_ROWS,
    Row,
)
from tests.support.servers.workload import (
    LOGPROBS,
    OUTPUT_TOKENS,
    SCENARIOS,
    Answer,
    Prompt,
    ask,
    ask_many,
    completion,
    forgets,
    series,
)
from vllm_pd_connector.instance_info import parse

SHORT_LEASE_S = 8.0
"""How long prefill instances of the plain rows, and of those tested like them, keep blocks that nobody fetches; some
tests wait for that."""

PATIENCE = {"handshake_timeout": 40.0, "confirm_timeout": 40.0}
"""Seconds for the other rows: several workers per instance on few cores, which spin while they wait for each other."""

KERNELS = ("ATEN_CPU_CAPABILITY", "PD_TEST_AVX2")
"""Variables by which torch and vLLM choose their kernels; servers inherit them."""

SETTLE_S = 90.0
CACHE_FACTS = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
HOLDINGS = re.compile(
    r"^vllm:(kv_cache_usage_perc|pd_leases|pd_conversations_held|pd_quarantined_blocks)\{[^}]*\} (\S+)$", re.MULTILINE
)


def until(condition: Callable[[], bool], what: str, seconds: float = SETTLE_S) -> None:
    """Wait until a condition holds; fail with its name if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def extras(family: str) -> dict[str, Any]:
    """What a family's requests ask for beside tokens, so that their answers can be compared."""
    return LOGPROBS if rounds_to_bfloat16(family) else {}


class Baselines:
    """Answers of a plain run, by family and prompt."""

    def __init__(self, servers: Servers, cache: Path, scenarios: Mapping[str, Sequence[Prompt]] = SCENARIOS):
        self._servers = servers
        self._cache = cache
        self._scenarios = scenarios
        self._known: dict[str, dict[Prompt, Answer]] = {}

    def tokens(self, family: str, prompt: Prompt) -> tuple[int, ...]:
        return self.of(family)[prompt].tokens

    def of(self, family: str) -> dict[Prompt, Answer]:
        """Answers to every prompt of every scenario; starts and stops a plain instance the first time."""
        if family not in self._known:
            asked = [prompt for scenario in self._scenarios.values() for prompt in scenario]
            path = self._cache / f"{family}-{self._key(family, asked)}.json"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                answers = self._run(family, asked)
                path.write_text(json.dumps([(answer.tokens, answer.logprobs) for answer in answers]))
            known = [Answer(tuple(tokens), None, _steps(raw)) for tokens, raw in json.loads(path.read_text())]
            self._known[family] = dict(zip(asked, known, strict=True))
        return self._known[family]

    def _key(self, family: str, asked: Sequence[Prompt]) -> str:
        weights = (make(MODELS[family]) / "model.safetensors").read_bytes()
        versions = [importlib.metadata.version(name) for name in ("vllm", "torch")]
        environment = [dict(MODELS[family].environment), [os.environ.get(name) for name in KERNELS]]
        started = [MODELS[family].flags, CPU_FLAGS, environment]
        facts = json.dumps([versions, started, OUTPUT_TOKENS, extras(family), list(asked)])
        return hashlib.sha256(weights + _plugins() + facts.encode()).hexdigest()[:16]

    def _run(self, family: str, asked: Sequence[Prompt]) -> list[Answer]:
        model = MODELS[family]
        spec = vllm_spec(f"plain-{family}", make(model), flags=model.flags, environment=model.environment)
        [plain] = self._servers.start(spec)
        try:
            # One at a time: a batch changes the order of float additions.
            return [ask(plain.url, completion(family, prompt, **extras(family))) for prompt in asked]
        finally:
            self._servers.stop(plain)


def _plugins() -> bytes:
    """The sources of the test plugins: of some families they compute the answers."""
    found = importlib.util.find_spec("pd_test_plugins")
    folders = map(Path, (found and found.submodule_search_locations) or ())
    return b"".join(path.read_bytes() for folder in folders for path in sorted(folder.glob("*.py")))


def _steps(raw: Sequence[Mapping[str, float]]) -> tuple[Mapping[int, float], ...]:
    return tuple({int(token): value for token, value in step.items()} for step in raw)


TEST_CONNECTORS = {
    "KeepingConnector": "pd_test_plugins.keeping",
    "StoringConnector": "pd_test_plugins.storing",
}


def sibling(connector: str, role: str, store: Path) -> dict[str, Any]:
    """The configuration of a connector of vLLM that keeps what it saves in a directory, or of one of the tests."""
    module = TEST_CONNECTORS.get(connector)
    store.mkdir(parents=True, exist_ok=True)
    return {
        "kv_connector": connector,
        "kv_role": "kv_both" if module else role,
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    } | ({"kv_connector_module_path": module} if module else {})


def together(*connectors: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of several connectors in one engine; the first that has tokens of a request loads them."""
    extra = {"connectors": connectors}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


class Cluster:
    """The servers of one row."""

    def __init__(self, row: Row, servers: Servers, baselines: Baselines, digest_dir: Path, connector: str):
        self.row = row
        self.baselines = baselines
        self.digest_dir = digest_dir
        self._servers = servers
        model = MODELS[row.family]
        plain = row in (*PLAIN_ROWS, *ORDER_ROWS, *OTHER_WAY_ROWS, *BESIDE_ROWS, *DRAFT_ROWS, *EVENT_ROWS)
        extra: dict[str, Any] = {"kv_lease_duration": SHORT_LEASE_S} if plain else {}
        if connector == "PDConnector":
            patience = {} if plain else PATIENCE
            extra |= {"transport": row.transport, "mode": row.mode, "digest_dir": str(digest_dir)} | patience
            extra |= {"push_when": "layers"} if row.by_layer else {}

        def spec(name: str, side: str, role: str, tp_size: int, *, sibling_first: bool = False) -> Any:
            transfer = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}
            if row.beside:
                both = transfer, sibling(row.beside, role, self.stored(side))
                transfer = together(*(both[::-1] if sibling_first else both))
            flags = (*model.flags, *row.flags(side))
            # The development mode adds the route that empties the prefix cache.
            # Up to eight processes share two cores here: none may poll without pause (see vllm-cpu-findings.md).
            environment = {"VLLM_SERVER_DEV_MODE": "1", "PD_TEST_POLITE": "1", **model.environment}
            environment |= row.environment(side)
            if row.events:
                flags += announcing(self.events_endpoint(side))
                environment["PYTHONHASHSEED"] = "0"  # equal hashes on both sides
            if row.mode == "push" and side == "p":
                environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(free_port())
            return vllm_spec(
                f"{row.id}-{name}",
                make(model),
                flags=flags,
                tp_size=tp_size,
                transfer=transfer,
                environment=environment,
            )

        self.spec = spec  # for another server of one side
        digest_dir.mkdir(parents=True, exist_ok=True)
        self.prefill, self.decode = servers.start(
            spec("prefill", "p", "kv_producer", row.p_tp), spec("decode", "d", "kv_consumer", row.d_tp)
        )
        [self.router] = servers.start(router_spec(f"{row.id}-router", [self.prefill.url], [self.decode.url]))
        self._at_start = {server.spec.name: self._holdings(server) for server in (self.prefill, self.decode)}

    @property
    def model(self) -> str:
        return self.row.family

    def events_endpoint(self, side: str) -> str:
        """Where side "p" or "d" publishes its events."""
        name = hashlib.sha256(f"{self.digest_dir} {side}".encode()).hexdigest()[:16]
        return f"ipc://@pd-test-{name}"  # in no directory: a socket's path must be short

    def stored(self, side: str) -> Path:
        """Where a connector beside this project's keeps what it saved on side "p" or "d"."""
        return self.digest_dir.parent / f"{self.row.id}-store-{side}"

    @functools.cached_property
    def block_tokens(self) -> int:
        """Tokens per block of the decode side, as it runs: vLLM raises what a hybrid model was asked to have."""
        return int(self._cache_facts()["block_size"])

    @functools.cached_property
    def num_blocks(self) -> int:
        """Blocks of the decode side."""
        return int(self._cache_facts()["num_gpu_blocks"])

    def _cache_facts(self) -> dict[str, str]:
        [facts] = CACHE_FACTS.findall(self.metrics(self.decode))
        return dict(re.findall(r'(\w+)="([^"]*)"', facts))

    def stop(self) -> None:
        self._servers.stop(self.router, self.prefill, self.decode)

    # -- requests -----------------------------------------------------------------------------------------------------

    def body(self, prompt: Prompt, **fields: Any) -> dict[str, Any]:
        return completion(self.model, prompt, **fields)

    def ask_prefill(self, prompt: Prompt, params: Any) -> Answer:
        """Run the first leg by hand."""
        return ask(self.prefill.url, self.body(prompt, max_tokens=1, kv_transfer_params=params))

    def prefill_only(self, prompt: Prompt) -> dict[str, Any]:
        """Run the first leg by hand and return the parameters for the second."""
        params = self.ask_prefill(prompt, {"do_remote_decode": True, "do_remote_prefill": False}).kv_transfer_params
        assert params, "the prefill instance handed nothing over"
        return params

    def decode_with(self, prompt: Prompt, params: Mapping[str, Any]) -> Answer:
        """Run the second leg by hand."""
        return ask(self.decode.url, self.body(prompt, kv_transfer_params=dict(params)))

    def check(self, asked: Sequence[Prompt], at_once: int = 1, *, past_ties: bool = False) -> None:
        """Send prompts through the router; every answer must be the plain run's, token by token.

        Where an answer parts from it at a near-tie (bfloat16 only), `past_ties` asks again with the plain run's tokens
        up to there, until the last token has been compared.
        """
        bodies = [self.body(prompt, **extras(self.model)) for prompt in asked]
        answers = ask_many(self.router.url, bodies, at_once)
        compare = self._disagreement_to_the_end if past_ties else self.disagreement
        wrong = [
            f"prompt of {len(prompt)} tokens: {found}"
            for prompt, answer in zip(asked, answers, strict=True)
            if (found := compare(prompt, answer))
        ]
        assert not wrong, "answers differ from the plain run's:\n" + "\n".join(wrong)

    def _disagreement_to_the_end(self, prompt: Prompt, answer: Answer) -> str:
        plain, known = self.baselines.of(self.model)[prompt], 0
        while True:
            rest = rest_of(plain, known)
            if found := disagreement(rest, answer, exact=not rounds_to_bfloat16(self.model)):
                return f"after {known} tokens: {found}"
            parting = parting_step(rest, answer)
            if parting is None or (known := known + parting + 1) == len(plain.tokens):
                return ""
            grown, left = (*prompt, *plain.tokens[:known]), len(plain.tokens) - known
            answer = ask(self.router.url, self.body(grown, max_tokens=left, **extras(self.model)))

    def disagreement(self, prompt: Prompt, answer: Answer) -> str:
        """How an answer differs from the plain run's; empty if it does not."""
        return disagreement(self.baselines.of(self.model)[prompt], answer, exact=not rounds_to_bfloat16(self.model))

    # -- what must hold after every test ------------------------------------------------------------------------------

    def _holdings(self, server: Server) -> dict[str, float]:
        """What an instance holds: the share of blocks in use, and the connector's leases and quarantine.

        Metrics are refreshed by engine steps, so a tiny request makes one first.
        """
        ask(server.url, self.body((0,), max_tokens=1))
        held = {name: float(value) for name, value in HOLDINGS.findall(self.metrics(server))}
        assert "kv_cache_usage_perc" in held, f"{server.spec.name} does not tell its vllm:kv_cache_usage_perc"
        return held

    def metrics(self, server: Server) -> str:
        """The Prometheus page of an instance."""
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            page: str = answer.read().decode()
        return page

    def release_of(self, server: Server) -> str:
        """The release of vLLM that an instance runs, as rows name it ("0.33")."""
        with urllib.request.urlopen(f"{server.url}/version", timeout=30) as answer:
            return ".".join(json.load(answer)["version"].split(".")[:2])

    def holds_blocks(self, server: Server) -> bool:
        """Whether a request holds blocks now; asks for nothing, so the figure is that of the last step."""
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            found = HOLDINGS.findall(answer.read().decode())
        return any(name == "kv_cache_usage_perc" and float(value) > 0 for name, value in found)

    @functools.cached_property
    def prefill_engine_id(self) -> str:
        """Under which a decode instance asks for caches."""
        with urllib.request.urlopen(f"{self.prefill.url}/metrics", timeout=30) as answer:
            return parse(answer.read().decode())[0].engine_id

    def is_settled(self, server: Server) -> bool:
        """Whether an instance holds nothing that it did not hold when it started."""
        assert server.process.poll() is None, f"{server.spec.name} died; its log ends with:\n{server.log_tail()}"
        at_start = self._at_start[server.spec.name]
        return all(value == at_start.get(name, 0.0) for name, value in self._holdings(server).items())

    def settle(self) -> None:
        """Wait until every block of both instances is free again."""
        for server in (self.prefill, self.decode):
            until(functools.partial(self.is_settled, server), f"every block of {server.spec.name} is free")

    def forget_prefixes(self, server: Server | None = None) -> None:
        """Empty a server's prefix cache, by default the decode side's, so that the same prompt is fetched again."""
        emptied = functools.partial(forgets, server or self.decode)
        until(emptied, "every block to be free, or vLLM keeps its prefix cache")

    def leases_expired(self) -> float:
        """How many leases of the prefill side have ended so far though nobody had fetched what they kept."""
        return series(self.prefill, "pd_leases_expired_total")

    def received(self) -> list[digests.Record]:
        """What decode workers received since `drop_digests` or `check_digests`, which compares it."""
        return digests.received(digests.load(self.digest_dir))

    def drop_digests(self) -> None:
        """Forget what came so far, not compared."""
        for record in digests.load(self.digest_dir):
            record.path.unlink()

    def check_digests(self) -> None:
        """Every byte read since the last call must be the prefill side's; of a settled pair, which has told all."""
        wrong = digests.differences(digests.load(self.digest_dir), MODELS[self.row.family].window_of)
        self.drop_digests()
        shown = "\n".join([*wrong[:20], f"({len(wrong)} in all)"])
        assert not wrong, f"bytes on the decode side differ from those on the prefill side:\n{shown}"
