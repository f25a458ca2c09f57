"""A prefill and two decode instances of a small real model give a plain instance's tokens.

Prefill has token-major pages and serves both ways. One decode instance has head-major pages and reads, so that its
caches are converted on the GPU; the other has pages like prefill's and is written into. Both compare sums of all that
they received with prefill's, so a difference is said to be one of bytes or one of rounding. Tokens are compared as the
end-to-end tests compare those of bfloat16: an answer may part from the plain run's at a near-tie only.

PD_GPU_MODEL names another model than MODEL, or its directory where the machine reaches no network.
"""

from __future__ import annotations

import os
import random
import re
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.launch import Server, Servers, Spec, StartError, vllm_spec
from tests.gpu.section import SMALL, Findings, gpu_count, run
from tests.support.servers.agreement import disagreement
from tests.support.servers.workload import LOGPROBS, Answer, Prompt, ask, completion

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "out" / "gpu" / "logs"
MODEL = "Qwen/Qwen3-0.6B"
LENGTHS = (2, 33, 257, 700) if SMALL else (2, 33, 257, 1000, 3000)
CONTEXT = 4096
START_S = 150.0
RECEIVED = re.compile(r"^vllm:pd_received_bytes_total\{[^}]*\} (\S+)$", re.MULTILINE)
GPU_FLAGS = ("--enforce-eager", "--max-model-len", str(CONTEXT), "--gpu-memory-utilization", "0.2")


@dataclass(frozen=True, slots=True)
class Instance:
    """One `vllm serve`: its place, and its KVTransferConfig (None: no connector)."""

    name: str
    gpu: int
    layout: str
    transfer: dict[str, Any] | None


def transfer(role: str, mode: str) -> dict[str, Any]:
    options = {"mode": mode, "verify": "all"}
    return {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": options}


def instances(gpus: int) -> list[Instance]:
    """Prefill on the first GPU, decode on the last."""
    return [
        Instance("plain", 0, "NHD", None),
        Instance("prefill", 0, "NHD", transfer("kv_producer", "push")),
        Instance("reads", gpus - 1, "HND", transfer("kv_consumer", "pull")),
        Instance("is written", gpus - 1, "NHD", transfer("kv_consumer", "push")),
    ]


def spec(one: Instance, model: Path) -> Spec:
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests" / "plugins"), os.environ.get("PYTHONPATH")]))
    common = {"PYTHONPATH": path, "VLLM_KV_CACHE_LAYOUT": one.layout}
    name = one.name.replace(" ", "-")
    if SMALL:
        # What stands in for a GPU here is vLLM's CPU platform, with the tests' backend, which has a GPU's layouts.
        return vllm_spec(name, model, transfer=one.transfer, environment={**common, "PD_TEST_REFERENCE_ATTENTION": "1"})
    made = vllm_spec(name, model, transfer=one.transfer, flags=GPU_FLAGS, on_cpu=False, cache_bytes=1 << 30)
    alone = {"CUDA_VISIBLE_DEVICES": _visible(one.gpu), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return Spec(made.name, made.command, made.port, {**made.environment, **alone, **common}, made.host)


def _visible(gpu: int) -> str:
    """What a process must be told to see only this one of the GPUs that this process sees."""
    seen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    return seen[gpu] if seen else str(gpu)


def directory() -> Path:
    """The model's files, fetched if they are not there."""
    if SMALL:
        from examples.make_models import MODELS, make

        return make(MODELS["gqa"])
    named = os.environ.get("PD_GPU_MODEL", MODEL)
    if Path(named).is_dir():
        return Path(named)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(named, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except Exception as error:
        raise StartError(f"{named} cannot be fetched ({error}); set PD_GPU_MODEL to a model's directory") from error


def hand_over(prefill: Server, decode: Server, model: str, prompt: Prompt) -> Answer:
    """Both legs, one after the other, as a router sends them."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    first = ask(prefill.url, completion(model, prompt, max_tokens=1, kv_transfer_params=asked))
    assert first.kv_transfer_params, "the prefill instance handed nothing over"
    return ask(decode.url, completion(model, prompt, kv_transfer_params=first.kv_transfer_params, **LOGPROBS))


def received(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        return int(sum(map(float, RECEIVED.findall(answer.read().decode()))))


def compare(findings: Findings, model: str, servers: Sequence[Server]) -> None:
    plain, prefill, *decodes = servers
    generator = random.Random(1)
    for length in LENGTHS:
        prompt = tuple(generator.randrange(256) for _ in range(length))
        expected = ask(plain.url, completion(model, prompt, **LOGPROBS))
        for decode in decodes:
            before = received(decode)
            wrong = disagreement(expected, hand_over(prefill, decode, model, prompt), exact=SMALL)
            moved = received(decode) - before
            what = f"{length} tokens, decode {decode.spec.name}"
            findings.require(not wrong, f"{what}: {wrong}")
            findings.require(moved > 0, f"{what}: nothing was received")
            findings.row(prompt=length, decode=decode.spec.name, tokens=wrong or "as the plain run's", bytes=moved)


def main(findings: Findings) -> None:
    model = directory()
    findings.remark(f"the model is {model}")
    with Servers(LOGS) as running:
        servers: list[Server] = []
        try:
            # One after another: vLLM measures the free memory of its GPU while it starts.
            for one in instances(max(gpu_count(), 1)):
                servers += running.start(spec(one, model), timeout=START_S)
            compare(findings, model.name, servers)
        finally:
            for server in servers:
                print(f"--- the end of the log of {server.spec.name}\n{server.log_tail(15)}", flush=True)


if __name__ == "__main__":
    run(main)
