"""Instances under attack: start and restart at the same address, requests by hand, what must hold afterwards.

The right answers come from a decode instance that is asked without parameters: it then computes the prompt itself, as
a plain vLLM does. Every request has a deadline; how it ended is an `Outcome`.
"""

from __future__ import annotations

import http.client
import json
import secrets
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from e2e.cluster import HOLDINGS
from e2e.workload import Prompt, completion, prompts
from faults import processes
from faults.network import Host, Network
from faults.relay import Relay, forward
from launch import Server, Servers, Spec, vllm_spec
from make_models import MODELS, make
from vllm_pd_connector.observability.instance import parse
from vllm_pd_connector.sidechannel.sockets import endpoint

LEASE_S = 4.0
LIMITS = {"handshake_timeout": 3.0, "transfer_timeout": 4.0, "confirm_timeout": 3.0, "kv_lease_duration": LEASE_S}
"""Seconds: short, so that a campaign sees deadlines pass."""

PATIENCE_S = sum(LIMITS.values()) + 6.0
"""How long a request may take beyond the time for which something was held back: all of its phases, and computing on
a machine that does other things too."""

RECOVERY_S = 45.0
UCX_OVER_NETWORK = {"TLS": "tcp,self", "NET_DEVICES": "net"}
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
FETCH = {"do_remote_decode": False, "do_remote_prefill": True}
HEAD_STARTS_S = (0.0, 0.05, -0.05)
LENGTHS = (40, 150, 700, 33, 300, 1100, 64, 500)
CACHE_BYTES = 256 << 20
MOST_PROMPTS = 12
"""That one fault asks for, with what comes before and after it."""

Params = dict[str, Any]


class End(Enum):
    """How a request ended. Everything but RIGHT and REFUSED is a defect, unless its server was killed (BROKEN)."""

    RIGHT = "right"
    REFUSED = "refused"
    ABORTED = "aborted"
    BROKEN = "broken off"
    WRONG = "wrong tokens"
    EMPTY = "empty 200"
    STUCK = "no end"


@dataclass(frozen=True, slots=True)
class Outcome:
    end: End
    detail: str = ""
    params: Params | None = None


@dataclass(eq=False, slots=True)
class Instance:
    """One `vllm serve`. `relay` stands before a prefill instance's side channel, `side_port` is the port behind it."""

    spec: Spec
    server: Server
    policy: str
    at_start: dict[str, float] = field(default_factory=dict)
    relay: Relay | None = None
    engine_id: str = ""
    side_port: int = 0
    generation: int = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def pid(self) -> int:
        return self.server.process.pid

    def processes(self, part: str) -> list[processes.Process]:
        """The processes of a part: "server" (the HTTP server), "engine", "worker"."""
        if part == "server":
            return processes.tree(self.pid)[:1]
        return processes.engines(self.pid) if part == "engine" else processes.workers(self.pid)


def policy_of(spec: Spec) -> str:
    """What an instance does about a read that failed: "fail" or "recompute"."""
    return str(json.loads(spec.command[spec.command.index("--kv-transfer-config") + 1])["kv_load_failure_policy"])


class World:
    """Prefill and decode instances; faults act on them.

    Args:
        policies: of the decode instances, `kv_load_failure_policy`; there is one instance for each.
        extra: more of `kv_connector_extra_config`; with mode push some requests send both legs at once.
        network: where the instances run; None: on this host.
    """

    def __init__(
        self,
        servers: Servers,
        family: str = "gqa",
        prefills: int = 1,
        policies: Sequence[str] = ("fail",),
        extra: Mapping[str, Any] | None = None,
        network: Network | None = None,
    ) -> None:
        self.network = network
        self._servers = servers
        self.pushes = (extra or {}).get("mode") == "push"
        self._handed_over = 0
        self.family = family
        self.prompts = [p for i in range(4) for p in prompts(f"faults {i}", LENGTHS)]
        self._next = 0
        specs = []
        sides = (("prefill", "kv_producer", ["fail"] * prefills), ("decode", "kv_consumer", policies))
        for side, role, policies_of in sides:
            for number, policy in enumerate(policies_of):
                transfer = {
                    "kv_connector": "PDConnector",
                    "kv_role": role,
                    "kv_load_failure_policy": policy,
                    "kv_connector_extra_config": {**LIMITS, **(extra or {})},
                }
                specs.append(self._spec(f"{side}{number}", transfer, network.hosts[side] if network else None))
        started = servers.start(*specs)
        instances = [Instance(spec, server, policy_of(spec)) for spec, server in zip(specs, started, strict=True)]
        self.prefills, self.decodes = instances[:prefills], instances[prefills:]
        self.answers: dict[Prompt, tuple[int, ...]] = {}
        self._learn()

    def _spec(self, name: str, transfer: dict[str, Any], host: Host | None) -> Spec:
        model = MODELS[self.family]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "PD_TEST_POLITE": "1", **model.environment}
        place: dict[str, Any] = {}
        if host is not None:
            place = {"host": host.control, "prefix": host.command()}
            environment |= {"VLLM_HOST_IP": host.control, "GLOO_SOCKET_IFNAME": "ctl"}
            own = {"side_channel_host": host.address, "transport_options": {"ucx": UCX_OVER_NETWORK}}
            transfer["kv_connector_extra_config"] |= own
        return vllm_spec(
            name,
            make(model),
            flags=("--block-size", str(model.block_size), *model.flags),
            transfer=transfer,
            environment=environment,
            cache_bytes=CACHE_BYTES,
            **place,
        )

    @property
    def instances(self) -> list[Instance]:
        return [*self.prefills, *self.decodes]

    def pair(self, number: int) -> tuple[Instance, Instance]:
        """The pair of instances for the fault of this number: every pair in turn."""
        n, m = len(self.prefills), len(self.decodes)
        return self.prefills[number % n], self.decodes[(number + number // n) % m]

    def close(self) -> None:
        for instance in self.instances:
            if instance.relay is not None:
                instance.relay.close()

    def _learn(self) -> None:
        for prompt in self.prompts:
            tokens = self._tokens(self.post(self.decodes[0], self._body(prompt), 120.0)[1])
            assert tokens, f"no answer to a prompt of {len(prompt)} tokens"
            self.answers[prompt] = tokens
        self.forget_prefixes()
        for instance in self.instances:
            self._look_at(instance)

    # -- requests -----------------------------------------------------------------------------------------------------

    def prompt(self) -> Prompt:
        """The next prompt. When all were used the caches are emptied, so that each is transferred again."""
        if self._next == len(self.prompts):
            self._next = 0
            self.forget_prefixes()
        self._next += 1
        return self.prompts[self.last]

    def settled(self) -> None:
        """Nothing is under way: while every block is free the caches can be emptied, so that prompts come again."""
        if self._next > len(self.prompts) - MOST_PROMPTS:
            self._next = 0
            self.forget_prefixes()

    @property
    def last(self) -> int:
        """The number of the prompt that was given out last."""
        return self._next - 1

    def forget_prefixes(self) -> None:
        for instance in self.instances:
            request = urllib.request.Request(f"{instance.url}/reset_prefix_cache", method="POST")
            with urllib.request.urlopen(request, timeout=30) as answer:
                answer.read()

    def _body(self, prompt: Prompt, **fields: Any) -> Params:
        return completion(self.family, prompt, **fields)

    def post(self, instance: Instance, body: Params, seconds: float) -> tuple[int, Any]:
        """Status and decoded answer. Raises OSError or HTTPException when the connection ends without an answer."""
        connection = self._connect(instance, seconds)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            return response.status, json.loads(content) if content else None
        finally:
            connection.close()

    def _connect(self, instance: Instance, seconds: float) -> http.client.HTTPConnection:
        address = urllib.parse.urlsplit(instance.url)
        return http.client.HTTPConnection(address.hostname or "", address.port, timeout=seconds)

    def _tokens(self, answer: Any) -> tuple[int, ...]:
        return tuple(answer["choices"][0].get("token_ids") or ()) if isinstance(answer, dict) else ()

    def ask(self, instance: Instance, prompt: Prompt, params: Params, held_s: float = 0.0, **fields: Any) -> Outcome:
        """One leg, judged. `held_s` is how long the fault itself may hold it up."""
        began = time.monotonic()
        try:
            status, answer = self.post(
                instance, self._body(prompt, kv_transfer_params=params, **fields), PATIENCE_S + held_s
            )
        except TimeoutError:
            return Outcome(End.STUCK, f"no answer from {instance.name} in {time.monotonic() - began:.1f} s")
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Outcome(End.BROKEN, f"{instance.name}: {type(error).__name__}: {error}")
        if status != 200:
            return Outcome(End.REFUSED, f"HTTP {status}: {str(answer)[:300]}")
        if (finish := answer["choices"][0]["finish_reason"]) == "abort":
            # vLLM's own way to end what runs when its server is told to end.
            return Outcome(End.BROKEN, f"{instance.name}: finish_reason {finish}")
        tokens, expected = self._tokens(answer), self.answers[prompt]
        want = expected[: fields.get("max_tokens", len(expected))]
        if not tokens:
            return Outcome(End.EMPTY, str(answer)[:300])
        end = End.RIGHT if tokens == want else End.WRONG
        return Outcome(end, "" if end is End.RIGHT else f"{tokens} instead of {want}", answer.get("kv_transfer_params"))

    def prefill(self, p: Instance, prompt: Prompt, held_s: float = 0.0) -> Outcome:
        """The first leg. Its parameters name the relay where the instance has one."""
        outcome = self.ask(p, prompt, dict(KEEP), held_s, max_tokens=1)
        # Its token is nobody's answer: with windows and states prefill stops one token before the prompt's end.
        if outcome.end not in (End.RIGHT, End.WRONG):
            return outcome
        if outcome.params is None:
            return Outcome(End.REFUSED, f"{p.name} handed nothing over")
        return Outcome(End.RIGHT, params=self.through_relay(p, outcome.params))

    def through_relay(self, p: Instance, params: Params) -> Params:
        if self.network is not None:
            return params
        return {**params, "remote_host": "127.0.0.1", "remote_port": self.relay(p).port}

    def relay(self, p: Instance) -> Relay:
        """The man in the middle before a prefill instance."""
        if p.relay is None:
            p.relay = Relay(endpoint("127.0.0.1", p.side_port))
        return p.relay

    def named(self, p: Instance, name: str = "") -> tuple[Params, Params]:
        """Parameters of two legs that find each other by their common name, in mode push."""
        common = {"transfer_id": name or secrets.token_hex(8)}
        place = {"remote_engine_id": p.engine_id, "remote_host": "127.0.0.1", "remote_port": self.relay(p).port}
        return {**KEEP, **common}, {**FETCH, **common, **place}

    def decode(self, d: Instance, prompt: Prompt, params: Params, held_s: float = 0.0) -> Outcome:
        return self.ask(d, prompt, params, held_s)

    def both(self, p: Instance, d: Instance, prompt: Prompt, held_s: float = 0.0) -> Outcome:
        """Both legs: one after the other, or, in mode push every other time, at once in either order."""
        self._handed_over += 1
        if self.pushes and self.network is None and self._handed_over % 2:
            return self.at_once(p, d, prompt, HEAD_STARTS_S[self._handed_over // 2 % len(HEAD_STARTS_S)], held_s)
        first = self.prefill(p, prompt, held_s)
        if first.end is not End.RIGHT:
            return first
        assert first.params is not None
        return self.decode(d, prompt, first.params, held_s)

    def at_once(
        self, p: Instance, d: Instance, prompt: Prompt, head_start_s: float = 0.0, held_s: float = 0.0, name: str = ""
    ) -> Outcome:
        """Both legs at once, in mode push; the prefill has a head start, or the decode leg if that is negative."""
        keep, fetch = self.named(p, name)

        def prefill() -> Outcome:
            threading.Event().wait(max(0.0, -head_start_s))
            return self.ask(p, prompt, keep, held_s, max_tokens=1)

        first = begin(prefill)
        threading.Event().wait(max(0.0, head_start_s))
        second = self.decode(d, prompt, fetch, held_s)
        left = first.result(2 * PATIENCE_S + held_s - min(0.0, head_start_s))
        bad = (End.WRONG, End.EMPTY, End.STUCK)
        return left if second.end not in bad and left.end in (End.BROKEN, *bad[1:]) else second

    def leave(self, instance: Instance, prompt: Prompt, params: Params, after_s: float) -> Outcome:
        """A client that goes away."""
        connection = self._connect(instance, 10.0)
        try:
            body = json.dumps(self._body(prompt, kv_transfer_params=params))
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            threading.Event().wait(after_s)
        except OSError as error:
            return Outcome(End.BROKEN, f"{instance.name}: {error}")
        finally:
            connection.close()
        return Outcome(End.ABORTED)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def restart(self, instance: Instance) -> None:
        """End what is left of an instance and start it again at the same addresses."""
        self._servers.stop(instance.server)
        [instance.server] = self._servers.start(instance.spec)
        instance.generation += 1
        self._look_at(instance)

    def _look_at(self, instance: Instance) -> None:
        """Learn what an instance that has just started holds, and under which names it is asked."""
        instance.at_start = self.holdings(instance)
        info = parse(self._metrics(instance))[0]
        instance.engine_id, instance.side_port = info.engine_id, info.side_channel_port

    def _metrics(self, instance: Instance) -> str:
        with urllib.request.urlopen(f"{instance.url}/metrics", timeout=30) as answer:
            return str(answer.read(), "utf-8")

    def holdings(self, instance: Instance) -> dict[str, float]:
        """What an instance holds. Metrics are renewed by engine steps, so a tiny request makes one first."""
        self.post(instance, self._body((0,), max_tokens=1), 30.0)
        return {name: float(value) for name, value in HOLDINGS.findall(self._metrics(instance))}

    def dead(self) -> list[str]:
        """Instances whose server or engine has ended."""
        return [i.name for i in self.instances if i.server.process.poll() is not None or not i.processes("engine")]

    def leaks(self, seconds: float = 3 * LEASE_S + PATIENCE_S) -> list[str]:
        """What instances still hold after everything had time to end."""
        deadline = time.monotonic() + seconds
        while True:
            held = {i.name: self._excess(i) for i in self.instances}
            if not any(held.values()) or time.monotonic() > deadline:
                return [f"{name} holds {excess}" for name, excess in held.items() if excess]
            time.sleep(0.2)

    def _excess(self, instance: Instance) -> dict[str, float]:
        try:
            now = self.holdings(instance)
        except (OSError, http.client.HTTPException) as error:
            return {str(error): 1.0}
        return {name: value for name, value in now.items() if value != instance.at_start.get(name, 0.0)}

    def recovers(self) -> list[str]:
        """Every pair of instances must serve again; what the last answer was if one does not."""
        failed = []
        if self.network is not None:
            self.network.mend()
        for p, d in map(self.pair, range(max(len(self.prefills), len(self.decodes)))):
            if p.relay is not None:
                p.relay.obey(forward)
            deadline = time.monotonic() + RECOVERY_S
            while (outcome := self.both(p, d, self.prompt())).end is not End.RIGHT:
                if outcome.end in (End.WRONG, End.EMPTY) or time.monotonic() > deadline:
                    failed.append(f"{p.name} to {d.name} does not recover: {outcome.end.value}: {outcome.detail}")
                    break
                time.sleep(0.25)
        return failed


def begin(run: Callable[[], Outcome]) -> Future[Outcome]:
    """Run a request in a thread of its own."""
    future: Future[Outcome] = Future()

    def body() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return future


def log_of(instances: Sequence[Instance], directory: Path) -> str:
    return ", ".join(str(directory / f"{instance.name}.log") for instance in instances)
