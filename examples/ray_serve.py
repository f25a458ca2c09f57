"""Prefill and decode replicas as one Ray Serve LLM application on this machine; ends with SIGTERM or Ctrl-C.

    python examples/ray_serve.py --model Qwen/Qwen3-0.6B --prefills 1 --decodes 1 --keys keys   # a GPU for each replica
    python examples/ray_serve.py --model .cache/models/gqa --cpu --keys keys                 # no GPU needed

Needs `pip install '.[nixl,ray]'` beside vLLM. On a cluster use the same application from a config file:
docs/engines/ray.md. Replicas listen at this node's address, so they need keys (`vllm-pd keygen keys`), or
`--extra '{"allow_unauthenticated_peers": true}'` on a network that only you can reach.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.launch import CACHE_BYTES, CPU_ENVIRONMENT

FRACTION = 0.1
"""CPUs that Ray books for a replica with --cpu: a small machine runs more of them than it has cores."""


def replicas(options: argparse.Namespace, role: str, count: int) -> dict[str, Any]:
    """The LLMConfig of one side."""
    extra = {"mode": options.mode, **json.loads(options.extra)}
    if options.keys:
        extra["side_channel_keys"] = str(options.keys.resolve())
    engine: dict[str, Any] = {
        "kv_transfer_config": {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra}
    }
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": Path(options.model).name, "model_source": options.model},
        "deployment_config": {"num_replicas": count},
        "engine_kwargs": engine,
    }
    if options.cpu:
        engine |= {"enforce_eager": True, "dtype": "float32", "max_model_len": 2048}
        engine |= {"kv_cache_memory_bytes": CACHE_BYTES}
        config["accelerator_config"] = {"kind": "cpu"}
        config["placement_group_config"] = {"bundle_per_worker": {"CPU": FRACTION}}
        config["deployment_config"]["ray_actor_options"] = {"num_cpus": FRACTION}
        config["runtime_env"] = {"env_vars": CPU_ENVIRONMENT}
    return config


def application(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the application's builder."""
    return {
        "prefill_config": replicas(options, "kv_producer", options.prefills),
        "decode_config": replicas(options, "kv_consumer", options.decodes),
        "ingress_deployment_config": {
            "num_replicas": 1,
            "autoscaling_config": None,
            "ray_actor_options": {"num_cpus": FRACTION},
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prefills", type=int, default=1)
    parser.add_argument("--decodes", type=int, default=1)
    parser.add_argument("--mode", choices=("pull", "push", "auto"), default="pull")
    parser.add_argument("--keys", type=Path, help="directory made by `vllm-pd keygen`")
    parser.add_argument("--extra", default="{}", help="more members of kv_connector_extra_config, as JSON")
    parser.add_argument("--cpu", action="store_true", help="no GPUs: float32, eager, a small cache")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(arguments)

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from vllm_pd_connector.integrations.ray import build_pd_openai_app

    ray.init(include_dashboard=False, configure_logging=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # after Ray's own, which prints a trace of its stack
    try:
        serve.start(http_options={"host": options.host, "port": options.port})
        serve.run(build_pd_openai_app(application(options)), blocking=False)
        print(f"ready at http://{options.host}:{options.port}", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
