"""What the connector costs the threads of an engine in a step: an idle one, and one with many requests in flight.

Every step calls the same hooks: the scheduler thread builds the step's metadata and reads the workers' report, the
thread that launches forwards takes the metadata and asks for results. This calls them on real halves with a real block
pool, in vLLM's order, and times each side. No transfer thread runs; while nothing moves it sleeps, so it would not take
the interpreter from the threads that are measured. The cases:

- idle steps, also with leases that nobody reads, and of a connector that does nothing;
- IN_FLIGHT requests wait for their caches, in steps that compute nothing and in steps of as many that decode;
- IN_FLIGHT prefills are computed for decode instances (in mode push), with nobody who wants them yet, and with a want
  of each, where the steps of AT_ONCE become orders; a process in a worker's place takes them;
- a forward announces LAYERS layers (`push_when: layers`) while a push waits for it, per layer, a sleep apart: the
  transfer thread sleeps again before the next wave wakes it where what was written of the waves before has arrived; it
  looks by itself while others are written, and where a device computes them behind their launch; and nothing is done.

All of it is done PASSES times, since a moment of the machine is seconds long: what is told is the median of the passes'
figures, and the lowest and the highest median of one. Where other processes want the processor, the least step says
what it costs.

    python benchmarks/step.py [--reps 5000] [--json results.json]
"""

from __future__ import annotations

import argparse
import gc
import pickle
import secrets
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.engine_halves import (  # noqa: E402
    BLOCK_TOKENS,
    BLOCKS,
    IN_FLIGHT,
    PROMPT,
    Engine,
    connector,
    free_port,
    request,
    scheduled,
)
from benchmarks.report import write  # noqa: E402
from benchmarks.step_nothing import layers_of_nothing, nothing  # noqa: E402
from vllm_pd_connector.compat.base import KVConnectorRole  # noqa: E402
from vllm_pd_connector.compat.blocks import prompt_digest  # noqa: E402
from vllm_pd_connector.compat.memory import marker  # noqa: E402
from vllm_pd_connector.geometry.blocks import BlockTable  # noqa: E402
from vllm_pd_connector.metadata import StepMetadata  # noqa: E402
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef, PushInto  # noqa: E402
from vllm_pd_connector.sidechannel.client import SideChannelClient  # noqa: E402
from vllm_pd_connector.sidechannel.net.sockets import endpoint  # noqa: E402
from vllm_pd_connector.wake import Wake  # noqa: E402
from vllm_pd_connector.worker.forward_thread import ForwardThread  # noqa: E402
from vllm_pd_connector.worker.poll_interval import SHORTEST_S  # noqa: E402
from vllm_pd_connector.worker.push.step_clock import StepClock  # noqa: E402
from vllm_pd_connector.worker.push.waves import MAX_WAVES, WaveCount, waves_of  # noqa: E402
from vllm_pd_connector.worker.transfer_loop import TransferLoop  # noqa: E402

AT_ONCE = 8  # prefills in one step's budget of tokens
GOALS = {"idle": {"scheduler": 10.0, "forward": 10.0}, "in flight": {"scheduler": 100.0, "forward": 20.0}}
PASSES = 3
LAYERS, LAYER_GOAL, LAYER_S = (16, 32, 80), 5.0, 2e-5
CALM, WRITTEN, COMPUTED = "while nothing is under way", "while others are written", "computed behind its launch"
WORKER = """
import sys, time
from vllm_pd_connector.protocol.wire.push_messages import AwaitCommands, Commands
from vllm_pd_connector.wake import Wake
from vllm_pd_connector.worker.rpc import PendingCalls

calls, wake, left = PendingCalls(None), Wake(), False

def ask(seen):
    calls.ask(sys.argv[1], AwaitCommands(bytes(16), 0, seen), 60.0, taken)

def taken(outcome, now):
    global left
    left = not isinstance(outcome, Commands)
    if not left:
        ask(outcome.last)

ask(0)
while not left:
    calls.wait(wake, None)
    calls.deliver(time.monotonic())
"""
"""What a worker's process does that is ordered to write: it asks for orders until the instance leaves."""


IDLE = scheduled({})
DECODING = scheduled({f"d-{number}": (1000, 1) for number in range(IN_FLIGHT)})


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.01)


def asked(engine: Engine) -> bool:
    """Whether a worker waits for orders."""
    return engine.scheduler.scheduler.producer._server.counts().get("AwaitCommands", 0) > 0  # type: ignore[union-attr]


def hold_leases(engine: Engine, count: int) -> list[dict[str, Any]]:
    """Finish `count` prefills; what a router would give to decode instances."""
    answers = []
    for number in range(count):
        ids = [block.block_id for block in engine.blocks()]
        ended = request(number, {"do_remote_decode": True, "do_remote_prefill": False})
        engine.scheduler.on_new_request(ended)
        _, params = engine.scheduler.request_finished_all_groups(ended, (ids,))
        assert params is not None, "the lease is not held"
        answers.append(params)
    return answers


def load(engine: Engine, answers: list[dict[str, Any]]) -> None:
    """Have as many requests wait for their caches, of which the workers were told."""
    for number, params in enumerate(answers):
        waiting = request(number, params, status=RequestStatus.WAITING)
        engine.scheduler.on_new_request(waiting)
        tokens, _ = engine.scheduler.get_num_new_matched_tokens(waiting, 0)
        assert tokens == len(PROMPT), "nothing is loaded"
        engine.scheduler.update_state_after_alloc(waiting, KVCacheBlocks((engine.blocks(),)), tokens)
    assert len(engine.scheduler.build_connector_meta(IDLE).receives) == len(answers)


def begin_prefills(engine: Engine, *, wanted: bool) -> Callable[[int], Any]:
    """Accept prefills for decode instances, and with `wanted` have one want each; the steps that compute them, a block
    of AT_ONCE of them at a time."""
    home = engine.scheduler.scheduler.producer.home
    assert home is not None
    address, client, sent, ids = endpoint(home.host, home.port), SideChannelClient(), [], {}
    for number in range(IN_FLIGHT):
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"t-{number}"}
        begun = request(number, params, num_computed_tokens=0, status=RequestStatus.RUNNING)
        engine.scheduler.on_new_request(begun)
        ids[begun.request_id] = [block.block_id for block in engine.blocks()]
        engine.tables[begun.request_id] = [[]]
        if wanted:
            theirs = (BlockTable.of(0, range(1, BLOCKS + 1)),)
            there = InstanceAddress("decode", "ab" * 16, "127.0.0.1", 5600)
            digest = prompt_digest(begun, len(PROMPT))
            place = (0, 0, 0, 0, 1, secrets.token_bytes(16))
            into = PushInto(PrefillRef(f"t-{number}", None), there, *place, theirs, 0, len(PROMPT), digest)
            sent.append(client.send(address, into, 60.0))
    pushes = engine.scheduler.scheduler.producer._server.pushes  # type: ignore[union-attr]

    def all_wanted() -> bool:
        client.receive()
        return pushes._such(ids, lambda prefill: bool(prefill.registrations)) == ids.keys()

    if wanted:
        until(all_wanted, "every prefill to be wanted")
    client.close()
    names = list(ids)

    def step(number: int) -> Any:
        turn, first = divmod(number, len(names) // AT_ONCE)
        now = names[first * AT_ONCE : (first + 1) * AT_ONCE]
        engine.tables |= {name: [ids[name][: turn + 1]] for name in now}
        return scheduled({name: (turn * BLOCK_TOKENS, BLOCK_TOKENS) for name in now})

    return step


def announce_layers(count: int, reps: int, told: str) -> dict[str, Any]:
    """Microseconds of the forward's thread for one of so many layers, with a thread in the transfer thread's place that
    looks at the clock as that does, while other waves are written, computed, or neither (`told`)."""
    settings = {"side_channel_port": free_port(), "mode": "push", "push_when": "layers"}
    made = connector(KVConnectorRole.WORKER, "kv_producer", settings)
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(count)]
    clock, wake, pushes, ends = StepClock(), Wake(), SimpleNamespace(waiting=True), threading.Event()
    step, computed = 0, [True]

    def look() -> None:
        poller = select.poll()
        poller.register(wake.fileno(), select.POLLIN)
        while not ends.is_set():
            done, ahead = clock.done(), clock.ahead()
            writes = told == WRITTEN and ahead[0] > done  # what the first wave of a step has brought
            pushes.waiting = not writes
            pause = SHORTEST_S if writes else clock.pause(*max(ahead, (done + 1, 0)))
            if pause is None or pause >= 0.001:
                poller.poll(100 if pause is None else pause * 1000)
            elif not poller.poll(0):  # as `sidechannel.waiting` does
                time.sleep(pause)
            wake.clear()

    half, loop = made.worker, TransferLoop.__new__(TransferLoop)
    loop._push, loop._pushes, loop._wake = SimpleNamespace(clock=clock), pushes, wake  # type: ignore[assignment]
    loop._forwards = ForwardThread()
    half._count, half._loop, half._mark = WaveCount(waves_of(layers)), loop, marker(())
    half.follows_layers = True
    if told == COMPUTED:  # a device's, which has done all of a step when it has been launched
        half._mark = lambda: SimpleNamespace(query=computed.__len__)  # type: ignore[assignment]
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    times = []
    for step in range(1, reps + 1):
        made.bind_connector_metadata(StepMetadata(step=step))
        times.append(0.0)
        computed = []
        for layer in layers:
            time.sleep(LAYER_S)
            began = time.perf_counter()
            made.save_kv_layer(layer, None, None)  # type: ignore[arg-type]
            times[-1] += (time.perf_counter() - began) * 1e6 / count
        computed.append(True)
        loop.step_launched(step, lambda: True)
    ends.set()
    thread.join()
    assert clock.ahead() == (reps, min(count, MAX_WAVES)), "not every wave was told"
    return row(f"a layer of {count}, {told}", "forward", times, LAYER_GOAL)


def row(name: str, thread: str, times: list[float], goal: float) -> dict[str, Any]:
    return {
        "case": name,
        "thread": thread,
        "median_us": round(float(np.median(times)), 2),
        "p99_us": round(float(np.percentile(times, 99)), 2),
        "least_us": round(min(times), 2),
        "goal_us": goal,
    }


def measure(name: str, engine: Any, steps: Callable[[int], Any], reps: int) -> list[dict[str, Any]]:
    """Microseconds per step of the scheduler's thread and of the thread that launches forwards."""
    times: dict[str, list[float]] = {"scheduler": [], "forward": []}
    scheduler, worker = engine.scheduler, engine.worker

    def timed(thread: str, action: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = action()
        times[thread][-1] += (time.perf_counter() - began) * 1e6
        return value

    def forward(metadata: Any) -> KVConnectorOutput:
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        stats, report = worker.get_kv_connector_stats(), worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        assert not results.finished_recving, "nothing has ended"
        return KVConnectorOutput(kv_connector_stats=stats, kv_connector_worker_meta=report)

    for number in range(reps):
        for values in times.values():
            values.append(0.0)
        output = steps(number)
        metadata = timed("scheduler", lambda o=output: scheduler.build_connector_meta(o))
        sent = timed("scheduler", lambda m=metadata: pickle.dumps(m))
        metadata = timed("forward", lambda s=sent: pickle.loads(s))
        came = timed("forward", lambda m=metadata: forward(m))
        timed("scheduler", lambda o=came: scheduler.update_connector_output(o))
        timed("scheduler", scheduler.get_kv_connector_stats)
    goals = GOALS["idle" if name.startswith("idle") else "in flight"]
    return [row(name, thread, values, goals[thread]) for thread, values in times.items()]


def cases(reps: int) -> list[dict[str, Any]]:
    gc.freeze()  # as vLLM's engine core does when it has started
    rows = measure("idle, a connector that does nothing", nothing(), lambda _: IDLE, reps)
    holder = Engine("kv_producer")
    rows += measure("idle, prefill instance", holder, lambda _: IDLE, reps)
    answers = hold_leases(holder, IN_FLIGHT)
    rows += measure(f"idle, prefill instance, {IN_FLIGHT} leases", holder, lambda _: IDLE, reps)
    loader = Engine("kv_consumer")
    rows += measure("idle, decode instance", loader, lambda _: IDLE, reps)
    load(loader, answers)
    rows += measure(f"{IN_FLIGHT} wait for caches, nothing computed", loader, lambda _: IDLE, reps)
    rows += measure(f"{IN_FLIGHT} wait for caches, {IN_FLIGHT} decode", loader, lambda _: DECODING, reps)
    for wanted, told in ((False, "nobody wants them yet"), (True, "written step by step")):
        engine = Engine("kv_producer", mode="push")
        steps = begin_prefills(engine, wanted=wanted)
        home = engine.scheduler.scheduler.producer.home
        words = [sys.executable, "-c", WORKER, endpoint(home.host, home.port)]  # type: ignore[union-attr]
        worker = subprocess.Popen(words, cwd=ROOT)
        until(lambda e=engine: asked(e), "the worker's first question")
        rows += measure(
            f"{IN_FLIGHT} prefills, {AT_ONCE} a step, {told}",
            engine,
            steps,
            min(reps, IN_FLIGHT // AT_ONCE * (BLOCKS - 1)),
        )
        engine.scheduler.shutdown()
        assert worker.wait(30.0) == 0, "the process in the worker's place failed"
    floor = layers_of_nothing(LAYERS[0], min(reps, 100), LAYER_S)
    rows.append(row(f"a layer of {LAYERS[0]}, a connector that does nothing", "forward", floor, LAYER_GOAL))
    rows += [announce_layers(count, min(reps, 100), told) for count in LAYERS for told in (WRITTEN, COMPUTED, CALM)]
    loader.scheduler.shutdown()
    holder.scheduler.shutdown()
    gc.unfreeze()
    return rows


def together(passes: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each case."""
    rows = []
    for same in zip(*passes, strict=True):
        medians, p99, least = ([one[key] for one in same] for key in ("median_us", "p99_us", "least_us"))
        figures = {"median_us": float(np.median(medians)), "of_lowest_us": min(medians), "of_highest_us": max(medians)}
        rows.append(same[0] | figures | {"p99_us": float(np.median(p99)), "least_us": min(least)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=5000)
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "bench" / "step.json")
    options = parser.parse_args()
    rows = together([cases(max(1, options.reps // PASSES)) for _ in range(PASSES)])
    print(f"{'step':<56} {'thread':<10} {'median':>8} {'p99':>8} {'least':>8} {'goal':>6}   microseconds")
    for row in rows:
        figures = f"{row['median_us']:8.1f} {row['p99_us']:8.1f} {row['least_us']:8.1f} {row['goal_us']:6.0f}"
        print(f"{row['case']:<56} {row['thread']:<10} {figures}")
    write(options.json, {"reps": options.reps, "passes": PASSES, "unit": "us", "rows": rows})


if __name__ == "__main__":
    main()
