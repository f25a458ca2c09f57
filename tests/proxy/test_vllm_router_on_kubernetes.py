"""vLLM's own router (`vllm-router`, the released program) finds the pods of examples/kubernetes by their labels.

Kubernetes' API is a stand-in that lists two pods as the StatefulSets label them; the command is the documentation's.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.handed_over import handed_over
from tests.support.kustomize import named, render
from tests.support.ports import free_port
from tests.support.proxy.stand_ins import Instance, answers, info

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = {"prefill": "127.0.0.1", "decode": "127.0.0.2"}
COMPLETION = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
PORT = "8000"
WITHIN_S = 60.0


def documented() -> list[str]:
    """The words of the command for pods."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "kubernetes.md").read_text())
    [line] = [line for line in text.splitlines() if line.startswith("    vllm-router ")]
    return shlex.split(line)


def pods() -> list[dict[str, Any]]:
    """What Kubernetes says of the pods of a fleet that serves."""
    return [
        {
            "metadata": {"name": f"{name}-0", "namespace": "default", **set_["spec"]["template"]["metadata"]},
            "spec": {"containers": []},
            "status": {
                "phase": "Running",
                "podIP": ADDRESSES[name.removeprefix("pd-")],
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
        for (kind, name), set_ in ((named(each), each) for each in render(ROOT / "examples" / "kubernetes" / "1p1d"))
        if kind == "StatefulSet"
    ]


async def kubernetes(request: web.Request) -> web.StreamResponse:
    """Lists the pods; a watch of them sees nothing happen."""
    if request.query.get("watch") != "true":
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": pods()}
        )
    stream = web.StreamResponse(headers={"Content-Type": "application/json"})
    await stream.prepare(request)
    await asyncio.sleep(WITHIN_S)
    return stream


async def answer_of(url: str) -> Any:
    async with aiohttp.ClientSession() as client:
        while True:
            try:
                body = {"model": "m", "prompt": [1], "max_tokens": 2}
                async with client.post(f"{url}/v1/completions", json=body) as response:
                    if response.status == 200:
                        return await response.json()
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.1)


def configured(api: TestServer, file: Path) -> str:
    """A kubeconfig for it."""
    cluster, context = {"server": str(api.make_url(""))}, {"cluster": "c", "user": "u", "namespace": "default"}
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": context}],
    }  # fmt: skip
    file.write_text(yaml.safe_dump(config))
    return str(file)


async def hand_over(directory: Path) -> None:
    params, port = handed_over(), free_port()
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    done = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}], "usage": usage}
    prefill = Instance(answers(COMPLETION | done | {"kv_transfer_params": params}), info(mode="pull"), port=port)
    told = {"choices": [{"index": 0, "text": "right"}]}
    decode = Instance(answers(COMPLETION | told), info(role="kv_consumer"), port=port)
    async with asyncio.timeout(2 * WITHIN_S), AsyncExitStack() as stack:
        for side, instance in (("prefill", prefill), ("decode", decode)):
            instance.server.host = ADDRESSES[side]
            await instance.server.start_server()
            stack.push_async_callback(instance.server.close)
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/default/pods", kubernetes)
        api = TestServer(app)
        await api.start_server()
        stack.push_async_callback(api.close)
        own = str(free_port())
        program, *words = documented()
        at = {"--service-discovery-port": str(port), "--port": own}
        words = [
            at.get(before, word) if word == PORT else word for before, word in zip(["", *words], words, strict=False)
        ]
        words += ["--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1"]
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name(program)), *words],
            env={"KUBECONFIG": configured(api, directory / "config"), "PATH": "/usr/bin:/bin"},
            stdout=stack.enter_context((directory / "log").open("w")),
            stderr=subprocess.STDOUT,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        answer = await answer_of(f"http://127.0.0.1:{own}")
    assert answer["choices"][0]["text"] == "right"
    assert prefill.asked[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.asked[0]["kv_transfer_params"] == params


def test_pods_are_found_by_the_labels_of_the_manifests(tmp_path: Path) -> None:
    asyncio.run(hand_over(tmp_path))
