"""Instances under attack: start and restart at the same address, requests by hand, what must hold afterwards.

The right answers come from a decode instance that is asked without parameters: it then computes the prompt itself, as
a plain vLLM does. Every request has a deadline; how it ended is an `Outcome`.
"""

from __future__ import annotations

import http.client
import json
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
LENGTHS = (40, 150, 700, 33, 300, 1100, 64, 500)
CACHE_BYTES = 256 << 20

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
    """One `vllm serve`. `relay` stands before a prefill instance's side channel."""

    spec: Spec
    server: Server
    policy: str
    at_start: dict[str, float] = field(default_factory=dict)
    relay: Relay | None = None
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
        extra: more of `kv_connector_extra_config`.
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
            instance.at_start = self.holdings(instance)

    # -- requests -----------------------------------------------------------------------------------------------------

    def prompt(self) -> Prompt:
        """The next prompt. When all were used the caches are emptied, so that each is transferred again."""
        if self._next == len(self.prompts):
            self._next = 0
            self.forget_prefixes()
        self._next += 1
        return self.prompts[self.last]

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
        if p.relay is None:
            server = endpoint(params["remote_host"], params["remote_port"])
            p.relay = Relay(server)
        return {**params, "remote_host": "127.0.0.1", "remote_port": p.relay.port}

    def decode(self, d: Instance, prompt: Prompt, params: Params, held_s: float = 0.0) -> Outcome:
        return self.ask(d, prompt, params, held_s)

    def both(
        self,
        p: Instance,
        d: Instance,
        prompt: Prompt,
        held_s: float = 0.0,
        between: Callable[[Params], Params | None] = lambda params: params,
    ) -> Outcome:
        """Both legs; `between` may change the parameters."""
        first = self.prefill(p, prompt, held_s)
        if first.end is not End.RIGHT:
            return first
        assert first.params is not None
        return self.decode(d, prompt, between(first.params) or first.params, held_s)

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
        instance.at_start = self.holdings(instance)

    def holdings(self, instance: Instance) -> dict[str, float]:
        """What an instance holds. Metrics are renewed by engine steps, so a tiny request makes one first."""
        self.post(instance, self._body((0,), max_tokens=1), 30.0)
        with urllib.request.urlopen(f"{instance.url}/metrics", timeout=30) as answer:
            return {name: float(value) for name, value in HOLDINGS.findall(answer.read().decode())}

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
