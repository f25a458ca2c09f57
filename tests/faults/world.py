"""Instances under attack: start and restart at the same address, requests by hand, what must hold afterwards.

The right answers come from a decode instance that is asked without parameters: it then computes the prompt itself, as
a plain vLLM does. Every request has a deadline; how it ended is an `Outcome`.
"""

from __future__ import annotations

import http.client
import json
import secrets
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.launch import Server, Servers, router_spec
from tests.faults.asked import FETCH, KEEP, End, Outcome, Params, begin, pause
from tests.faults.instances import LEASE_S, LIMITS, Instance, spec_of
from tests.faults.system.network import Network
from tests.faults.system.relay import Relay, forward
from tests.support.ports import free_port
from tests.support.servers.workload import Prompt, completion, prompts
from vllm_pd_connector.instance_info import parse
from vllm_pd_connector.sidechannel.net.sockets import endpoint

PATIENCE_S = sum(LIMITS.values()) + 6.0
"""How long a request may take beyond the time for which something was held back: all of its phases, and computing on
a machine that does other things too."""

LEAVES_S = 3 * LEASE_S + PATIENCE_S
"""After which everything has had time to end."""
RECOVERY_S = 45.0
HEAD_STARTS_S = (0.0, 0.05, -0.05)
LENGTHS = (40, 150, 700, 33, 300, 1100, 64, 500)
MOST_PROMPTS = 12
"""That one fault asks for, with what comes before and after it."""


class World:
    """Prefill and decode instances; faults act on them.

    Args:
        policies: of the decode instances, `kv_load_failure_policy`; there is one instance for each.
        extra: more of `kv_connector_extra_config`; with mode push some requests send both legs at once, and prefill
            instances on this host answer bootstrap questions.
        network: where the instances run; None: on this host.
        tp_size: tensor-parallel size of every instance.
        routed: whether a router runs before them.
        both: two instances instead, each of which prefills for the other.
        hold: where the workers of prefill instances are held (`outlived`); None: they are not.
        flags: more of `vllm serve`, for every instance.
        asked: the prompts that are asked; else the same for all campaigns.
        relayed: whether a man in the middle stands before prefill instances on this host. Where none does, requests of
            a pull may go by the router, which has an interface for operators (`admin`).
        environment: more variables of every instance.
        stores: directory in which each instance has a store of prefixes, a connector beside this project's; None: none.
    """

    def __init__(
        self,
        servers: Servers,
        family: str = "gqa",
        prefills: int = 1,
        policies: Sequence[str] = ("fail",),
        extra: Mapping[str, Any] | None = None,
        network: Network | None = None,
        tp_size: int = 1,
        routed: bool = False,
        both: bool = False,
        hold: Path | None = None,
        flags: Sequence[str] = (),
        asked: Sequence[Prompt] = (),
        relayed: bool = True,
        environment: Mapping[str, str] | None = None,
        stores: Path | None = None,
    ) -> None:
        self.network = network
        self.hold = hold
        self._servers = servers
        self.pushes = (extra or {}).get("mode") == "push"
        self._handed_over = 0
        self.family = family
        self.prompts = list(asked) or [p for i in range(4) for p in prompts(f"faults {i}", LENGTHS)]
        self._next = 0
        specs = []
        sides = [("prefill", "kv_producer", ["fail"] * prefills), ("decode", "kv_consumer", policies)]
        if both:
            sides = [("both", "kv_both", ["fail"] * 2)]
        for side, role, policies_of in sides:
            for number, policy in enumerate(policies_of):
                own = dict(extra or {})
                if self.pushes and side == "prefill" and network is None:
                    own["bootstrap_port"] = free_port()
                host = network.hosts[side] if network else None
                specs.append(
                    spec_of(
                        f"{side}{number}",
                        role,
                        policy,
                        family,
                        own,
                        host,
                        tp_size,
                        hold if side == "prefill" else None,
                        flags,
                        environment or {},
                        stores / f"{side}{number}" if stores else None,
                    )
                )
        instances = [Instance(spec, server) for spec, server in zip(specs, servers.start(*specs), strict=True)]
        self.prefills, self.decodes = instances[:prefills], instances[prefills:]
        if both:
            self.prefills, self.decodes = instances, instances[::-1]
        self.router: Server | None = None
        self.admin = ""
        self._relayed = relayed and network is None
        if routed:
            urls = [i.url for i in self.prefills], [i.url for i in self.decodes]
            spec = router_spec("router", *urls)
            if not relayed:
                self.admin = f"http://127.0.0.1:{(port := free_port())}"
                spec = replace(spec, command=(*spec.command, "--admin-port", str(port)))
            [self.router] = servers.start(spec)
        self.answers: dict[Prompt, tuple[int, ...]] = {}
        self._learn()

    @property
    def instances(self) -> list[Instance]:
        return [*self.prefills, *(d for d in self.decodes if d not in self.prefills)]

    def pair(self, number: int) -> tuple[Instance, Instance]:
        """The pair of instances for the fault of this number: every pair in turn."""
        n, m = len(self.prefills), len(self.decodes)
        if self.prefills[0] in self.decodes:
            return self.prefills[number % n], self.decodes[number % n]
        return self.prefills[number % n], self.decodes[(number + number // n) % m]

    def close(self) -> None:
        for instance in self.instances:
            if instance.relay is not None:
                instance.relay.close()

    def _learn(self) -> None:
        for prompt in self.prompts:
            self.answers[prompt] = self.compute(self.decodes[0], prompt)
        self.forget_prefixes()
        for instance in self.instances:
            self._look_at(instance)
        if self._relayed:
            for p in self.prefills:
                p.relay = Relay(endpoint("127.0.0.1", p.side_port))

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
        """Empty every prefix cache, which vLLM refuses while blocks are held: at the longest until their leases end."""
        for instance in self.instances:
            deadline = time.monotonic() + LEAVES_S
            while not instance.forgets():
                assert time.monotonic() < deadline, f"{instance.name} keeps its prefix cache: blocks are held there"
                time.sleep(0.1)

    def _body(self, prompt: Prompt, **fields: Any) -> Params:
        return completion(self.family, prompt, **fields)

    def post(self, instance: Instance | Server, body: Params, seconds: float) -> tuple[int, Any]:
        """Status and decoded answer. Raises OSError or HTTPException when the connection ends without an answer."""
        connection = self._connect(instance, seconds)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            return response.status, json.loads(content) if content else None
        finally:
            connection.close()

    def _connect(self, instance: Instance | Server, seconds: float) -> http.client.HTTPConnection:
        address = urllib.parse.urlsplit(instance.url)
        return http.client.HTTPConnection(address.hostname or "", address.port, timeout=seconds)

    def _tokens(self, answer: Any) -> tuple[int, ...]:
        return tuple(answer["choices"][0].get("token_ids") or ()) if isinstance(answer, dict) else ()

    def compute(self, instance: Instance, prompt: Prompt, **fields: Any) -> tuple[int, ...]:
        """What an instance answers that is told nothing of a hand-off."""
        tokens = self._tokens(self.post(instance, self._body(prompt, **fields), 120.0)[1])
        assert tokens, f"{instance.name}: no answer to a prompt of {len(prompt)} tokens"
        return tokens

    def ask(
        self, instance: Instance | Server, prompt: Prompt, params: Params | None, held_s: float = 0.0, **fields: Any
    ) -> Outcome:
        """One leg, judged, or a client's request to the router. `held_s` is how long the fault may hold it up."""
        name = instance.name if isinstance(instance, Instance) else instance.spec.name
        began = time.monotonic()
        given = {} if params is None else {"kv_transfer_params": params}
        try:
            status, answer = self.post(instance, self._body(prompt, **given, **fields), PATIENCE_S + held_s)
        except TimeoutError:
            return Outcome(End.STUCK, f"no answer from {name} in {time.monotonic() - began:.1f} s", asked=name)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Outcome(End.BROKEN, f"{name}: {type(error).__name__}: {error}", asked=name)
        if status != 200:
            return Outcome(End.REFUSED, f"HTTP {status}: {str(answer)[:300]}", asked=name)
        if (finish := answer["choices"][0]["finish_reason"]) == "abort":
            # vLLM's own way to end what runs when its server is told to end.
            return Outcome(End.BROKEN, f"{name}: finish_reason {finish}", asked=name)
        found, expected = [tuple(choice.get("token_ids") or ()) for choice in answer["choices"]], self.answers[prompt]
        want = expected[: fields.get("max_tokens", len(expected))]
        if not all(found):
            return Outcome(End.EMPTY, str(answer)[:300], asked=name)
        wrong = [tokens for tokens in found if tokens != want]
        end = End.WRONG if wrong else End.RIGHT
        text = f"{wrong[0]} instead of {want}" if wrong else ""
        return Outcome(end, text, answer.get("kv_transfer_params"), name)

    def prefill(self, p: Instance, prompt: Prompt, held_s: float = 0.0, asked: Params = KEEP) -> Outcome:
        """The first leg, `asked` with a conversation's parameters in its next turn. Its own name the relay where the
        instance has one."""
        outcome = self.ask(p, prompt, dict(asked), held_s, max_tokens=1)
        # Its token is nobody's answer: with windows and states prefill stops one token before the prompt's end.
        if outcome.end not in (End.RIGHT, End.WRONG):
            return outcome
        if outcome.params is None:
            return Outcome(End.REFUSED, f"{p.name} handed nothing over")
        return Outcome(End.RIGHT, params=self.through_relay(p, outcome.params))

    def through_relay(self, p: Instance, params: Params) -> Params:
        if not self._relayed:
            return params
        return {**params, "remote_host": "127.0.0.1", "remote_port": self.relay(p).port}

    def relay(self, p: Instance) -> Relay:
        """The man in the middle before a prefill instance on this host."""
        assert p.relay is not None, f"{p.name} is on another host"
        return p.relay

    def named(self, p: Instance, name: str = "") -> tuple[Params, Params]:
        """Parameters of two legs that find each other by their common name, in mode push."""
        common = {"transfer_id": name or secrets.token_hex(8)}
        host = "127.0.0.1" if self.network is None else p.extra["side_channel_host"]
        port = self.relay(p).port if self._relayed else p.side_port
        place = {"remote_engine_id": p.engine_id, "remote_host": host, "remote_port": port}
        return {**KEEP, **common}, {**FETCH, **common, **place}

    def decode(self, d: Instance, prompt: Prompt, params: Params, held_s: float = 0.0) -> Outcome:
        return self.ask(d, prompt, params, held_s)

    def both(self, p: Instance, d: Instance, prompt: Prompt, held_s: float = 0.0) -> Outcome:
        """Both legs: one after the other, or, in mode push every other time, at once in either order."""
        self._handed_over += 1
        if self.pushes and self._handed_over % 2:
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
            pause(max(0.0, -head_start_s))
            return self.ask(p, prompt, keep, held_s, max_tokens=1)

        first = begin(prefill)
        pause(max(0.0, head_start_s))
        second = self.decode(d, prompt, fetch, held_s)
        left = first.result(2 * PATIENCE_S + held_s - min(0.0, head_start_s))
        bad = (End.WRONG, End.EMPTY, End.STUCK)
        return left if second.end not in bad and left.end in (End.BROKEN, *bad[1:]) else second

    def ask_router(self) -> Outcome:
        """Whether the router serves: a request in mode push. A pull's decode instance knows the prefill instance under
        the relay's address already, and would not be linked to it under another: there the router's own health."""
        assert self.router is not None
        if self.pushes:
            return self.ask(self.router, self.prompt(), None)
        try:
            with urllib.request.urlopen(f"{self.router.url}/health", timeout=PATIENCE_S):
                return Outcome(End.RIGHT, asked="router")
        except OSError as error:
            return Outcome(End.BROKEN, f"router: {error}", asked="router")

    def leave(
        self, instance: Instance | Server, prompt: Prompt, params: Params | None, after_s: float, **fields: Any
    ) -> Outcome:
        """A client that goes away."""
        connection = self._connect(instance, 10.0)
        given = {} if params is None else {"kv_transfer_params": params}
        try:
            body = json.dumps(self._body(prompt, **given, **fields))
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            pause(after_s)
        except OSError as error:
            name = instance.name if isinstance(instance, Instance) else instance.spec.name
            return Outcome(End.BROKEN, f"{name}: {error}", asked=name)
        finally:
            connection.close()
        return Outcome(End.ABORTED)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def restart(self, instance: Instance) -> None:
        """End what is left of an instance and start it again at the same addresses."""
        self._servers.stop(instance.server)
        [instance.server] = self._servers.start(instance.spec)
        instance.generation += 1
        instance.told = frozenset()
        self._look_at(instance)

    def _look_at(self, instance: Instance) -> None:
        """Learn what an instance that has just started holds, and under which names it is asked."""
        instance.at_start = self.holdings(instance)
        info = parse(instance.metrics())[0]
        instance.engine_id, instance.side_port = info.engine_id, info.side_channel_port

    def holdings(self, instance: Instance) -> dict[str, float]:
        """What an instance holds. Metrics are renewed by engine steps, so a tiny request makes one first."""
        self.post(instance, self._body((0,), max_tokens=1), 30.0)
        return instance.holdings()

    def dead(self) -> list[str]:
        """The servers whose own process or engine has ended, and the router if it has."""
        ended = [i.name for i in self.instances if i.server.process.poll() is not None or not i.processes("engine")]
        return ended + ["router"] * (self.router is not None and self.router.process.poll() is not None)

    def leaks(self, seconds: float = LEAVES_S) -> list[str]:
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
