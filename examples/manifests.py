"""The Kubernetes manifests of instances and router, written from the table of roles and flags (`examples/roles.py`),
and the alerts as an object, written from `deploy/prometheus/rules.yaml`.

    python -m examples.manifests            # writes them
    python -m examples.manifests --check    # says which differ from what would be written; `make lint` runs this

The rest of `examples/kubernetes` is written by hand: what is there once needs no template.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import roles
from examples.roles import DECODE, PREFILL, Role

DIRECTORY = Path(__file__).resolve().parent / "kubernetes"
RULES = DIRECTORY.parents[1] / "deploy" / "prometheus" / "rules.yaml"
FIRST_LINE = "# Written by `python -m examples.manifests`; what differs between roles is in examples/roles.py.\n"
IMAGE = "vllm-pd:0.32"
USER = 2000
PORT = 8000
"""What a Service and its router call an instance by."""
BEHIND_SIDECAR = 8200
"""Where llm-d's sidecar finds its vLLM by default, from llm-d-router 0.10 on."""
ADMIN_PORT = 8001
"""Where the router has its operators' routes, on loopback."""
KEYS = "/etc/pd/keys"
ENGINE_ID = "$(POD_NAME)"
"""Outlives a restart: for peers, routers and dashboards the pod that comes back is the same instance. vLLM gives each
data-parallel engine a suffix of its own."""

PAUSE_S, DRAIN_S, GRACE_S = 5, 90, 140
"""preStop; how long what has begun may take to end (`--shutdown-timeout`); until the kernel ends it."""
HANDED_OVER_S = 35
"""How long prefill keeps what nobody has read yet when it ends: a little more than `kv_lease_duration`. vLLM kills the
engine when `--shutdown-timeout` is over, whatever its workers wait for, so there both are in that."""
PROBE_S = 10
"""How long an answer to a probe may take: an API server under load needs more than the one second of Kubernetes."""

SIDECAR = """\
      initContainers:
        # llm-d's routing sidecar takes what the gateway sends and asks the prefill instance that the EPP chose.
        # From llm-d-router 0.10 on it finds vLLM at {behind} by its default; before that add --vllm-port={behind}.
        - name: routing-proxy
          image: ghcr.io/llm-d/llm-d-router-disagg-sidecar:latest # pin that of your llm-d
          restartPolicy: Always
          args: [--port={port}, --kv-connector=nixlv2, --secure-proxy=false]
          ports: [{{ name: gateway, containerPort: {port} }}]
          securityContext: {{ allowPrivilegeEscalation: false, capabilities: {{ drop: [ALL] }} }}
          resources: {{ requests: {{ cpu: 250m, memory: 128Mi }} }}
"""

INSTANCE = """\
apiVersion: v1
kind: Service
metadata:
  name: pd-{role}
spec:
  clusterIP: None
  # Who routes finds out itself which instances serve.
  publishNotReadyAddresses: true
  selector: {{ app: pd, part: {role} }}
  ports: [{{ {service} }}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: pd-{role}
spec:
  serviceName: pd-{role}
  replicas: 1
  podManagementPolicy: Parallel
  selector:
    matchLabels: {{ app: pd, part: {role} }}
  template:
    metadata:
      labels: {{ {labels} }}
    spec:
      # preStop and --shutdown-timeout come before it.
      terminationGracePeriodSeconds: {grace}
      # The group may read the keys and write to the volume, whose files get it once and not at each start.
      securityContext:
        runAsNonRoot: true
        runAsUser: {user}
        runAsGroup: {user}
        fsGroup: {user}
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile: {{ type: RuntimeDefault }}
{sidecar}\
      containers:
        - name: vllm
          image: {image}
          command: {command}
          args:
{args}
          envFrom: [{{ configMapRef: {{ name: pd-model }} }}]
          env:
            - name: VLLM_NIXL_SIDE_CHANNEL_HOST
              valueFrom: {{ fieldRef: {{ fieldPath: status.podIP }} }}
            - name: POD_NAME
              valueFrom: {{ fieldRef: {{ fieldPath: metadata.name }} }}
            - name: HF_TOKEN
              valueFrom: {{ secretKeyRef: {{ name: hf-token, key: token, optional: true }} }}
          ports:
            - {{ name: http, containerPort: {port} }}
            - {{ name: side-channel, containerPort: {side_channel} }}
          # vLLM answers once it can serve, and no more when its engine has died; under load an answer takes seconds.
          # The first may take failureThreshold times periodSeconds: 15 minutes to download, load and compile.
          startupProbe: {{ httpGet: {{ path: /health, port: http }}, timeoutSeconds: {probe}, periodSeconds: 5,
            failureThreshold: 180 }}
          readinessProbe: {{ httpGet: {{ path: /health, port: http }}, timeoutSeconds: {probe}, periodSeconds: 5 }}
          livenessProbe: {{ httpGet: {{ path: /health, port: http }}, timeoutSeconds: {probe}, periodSeconds: 10,
            failureThreshold: 6 }}
          # Until those who route have heard that this one ends.
          lifecycle: {{ preStop: {{ exec: {{ command: [sleep, "{pause}"] }} }} }}
          securityContext: {{ allowPrivilegeEscalation: false, capabilities: {{ drop: [ALL] }} }}
          resources:
            requests: {{ cpu: "4", memory: 16Gi }}
            limits: {{ nvidia.com/gpu: 1 }}
          volumeMounts:
            - {{ name: shm, mountPath: /dev/shm }}
            - {{ name: keys, mountPath: {keys}, readOnly: true }}
            - {{ name: cache, mountPath: /cache }}
      volumes:
        - {{ name: shm, emptyDir: {{ medium: Memory, sizeLimit: 8Gi }} }}
        - {{ name: keys, secret: {{ secretName: pd-keys, defaultMode: 0400 }} }}
  volumeClaimTemplates:
    - metadata: {{ name: cache }}
      spec: {{ accessModes: [ReadWriteOnce], resources: {{ requests: {{ storage: 100Gi }} }} }}
"""

ROUTER = """\
apiVersion: v1
kind: Service
metadata:
  name: pd-router
spec:
  selector: {{ app: pd, part: router }}
  ports: [{{ name: http, port: {port} }}]
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: pd-router
spec:
  replicas: 1
  selector:
    matchLabels: {{ app: pd, part: router }}
  template:
    metadata:
      labels: {{ app: pd, part: router }}
    spec:
      terminationGracePeriodSeconds: {grace}
      securityContext:
        runAsNonRoot: true
        runAsUser: {user}
        runAsGroup: {user}
        seccompProfile: {{ type: RuntimeDefault }}
      containers:
        - name: router
          image: {image}
          command: {command}
          args:
{args}
          # Operators' routes are on loopback: kubectl port-forward deployment/pd-router {admin}
          ports: [{{ name: http, containerPort: {port} }}]
          # 200 while it has a usable instance of each side.
          readinessProbe: {{ httpGet: {{ path: /health, port: http }}, timeoutSeconds: {probe}, periodSeconds: 5 }}
          # Until clients have heard that this one takes no more requests.
          lifecycle: {{ preStop: {{ exec: {{ command: [sleep, "{pause}"] }} }} }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {{ drop: [ALL] }}
          resources:
            requests: {{ cpu: 500m, memory: 512Mi }}
            limits: {{ memory: 4Gi }}
"""

ALERTS = """\
# Written by `python -m examples.manifests` from deploy/prometheus/rules.yaml: the same, for the Prometheus operator.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: pd
  labels: {{ release: prometheus }} # as in pods.yaml
spec:
{rules}
"""

MODEL = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: pd-model
data:
  MODEL: {model}
  # All that is downloaded or compiled goes to the pod's volume.
  HOME: /cache
  HF_HOME: /cache/huggingface
"""

MORE_INSTANCES = """\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: pd-router
spec:
  template:
    spec:
      containers:
        - name: router
          args:
{args}
"""


def flow(words: Sequence[str]) -> str:
    """A list on one line; what YAML would take for a number is quoted."""
    return f"[{', '.join(json.dumps(word) if word.isdigit() else word for word in words)}]"


def block(words: Sequence[str]) -> str:
    """A list with a line for each; JSON goes over several, which YAML joins with spaces again."""
    lines = []
    for word in words:
        if word.startswith("{"):
            first, *more = textwrap.wrap(f"'{word}'", 100, break_long_words=False, break_on_hyphens=False)
            lines += [f"- {first}", *(f"  {line}" for line in more)]
        else:
            lines.append(f"- {json.dumps(word) if word.isdigit() else word}")
    return textwrap.indent("\n".join(lines), " " * 12)


def instance(role: Role, *, behind_sidecar: bool = False) -> str:
    """Service and StatefulSet of a side."""
    port = BEHIND_SIDECAR if behind_sidecar else PORT
    settings: dict[str, str | int] = {"side_channel_port": roles.SIDE_CHANNEL_PORT, "side_channel_keys": KEYS}
    if role.serves_reads:
        settings["shutdown_timeout"] = HANDED_OVER_S
    drain = DRAIN_S + (HANDED_OVER_S if role.serves_reads else 0)
    own = roles.transfer_config(role, roles.TRANSPORTS[0], roles.MODES[0], settings)
    transfer = {"engine_id": ENGINE_ID, **own}
    place = roles.serve_words("$(MODEL)", "0.0.0.0", port, None)
    words = roles.serve_words("$(MODEL)", "0.0.0.0", port, transfer, ["--shutdown-timeout", str(drain)])
    labels = f"app: pd, part: {role.name}" + (f", llm-d.ai/role: {role.name}" if behind_sidecar else "")
    return FIRST_LINE + INSTANCE.format(
        role=role.name,
        service=f"name: http, port: {PORT}" + (f", targetPort: {port}" if behind_sidecar else ""),
        labels=labels,
        sidecar=SIDECAR.format(port=PORT, behind=BEHIND_SIDECAR) if behind_sidecar else "",
        image=IMAGE,
        command=flow(place),
        args=block(words[len(place) :]),
        port=port,
        side_channel=roles.SIDE_CHANNEL_PORT,
        keys=KEYS,
        user=USER,
        grace=GRACE_S,
        pause=PAUSE_S,
        probe=PROBE_S,
    )


def urls(prefills: int, decodes: int) -> list[str]:
    """What the instances of a fleet are called by: each pod has a name of its own."""
    counts = {PREFILL: prefills, DECODE: decodes}
    return [f"http://pd-{role.name}-{i}.pd-{role.name}:{PORT}" for role, n in counts.items() for i in range(n)]


def router(instances: Sequence[str]) -> str:
    """Service and Deployment of the router."""
    flags = ["--shutdown-timeout", str(DRAIN_S), "--admin-port", str(ADMIN_PORT)]
    words = roles.router_words("0.0.0.0", PORT, instances, flags)
    own = len(words) - len(instances)
    return FIRST_LINE + ROUTER.format(
        command=flow(words[:own]),
        admin=ADMIN_PORT,
        args=block(words[own:]),
        image=IMAGE,
        port=PORT,
        user=USER,
        grace=GRACE_S,
        pause=PAUSE_S,
        probe=PROBE_S,
    )


def model() -> str:
    """Which model, and where what is downloaded or compiled goes."""
    return FIRST_LINE + MODEL.format(model=roles.MODEL)


def alerts() -> str:
    """The rules of a Prometheus that reads files, as an object for one that the operator runs."""
    lines = RULES.read_text().splitlines()
    return ALERTS.format(rules=textwrap.indent("\n".join(line for line in lines if line[:1] != "#"), "  "))


def files() -> Mapping[Path, str]:
    """What is to be written."""
    own = roles.router_words("", 0, ())
    more = roles.router_words("", 0, urls(2, 2))[len(own) :]
    texts = {
        "common/model.yaml": model(),
        "prefill/prefill.yaml": instance(PREFILL),
        "decode/decode.yaml": instance(DECODE),
        "llm-d/decode.yaml": instance(DECODE, behind_sidecar=True),
        "router/router.yaml": router(urls(1, 1)),
        "xpyd/router.yaml": FIRST_LINE + MORE_INSTANCES.format(args=block(more)),
        "monitoring/rules.yaml": alerts(),
    }
    return {DIRECTORY / name: text for name, text in texts.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Write the manifests from the table of roles and flags, and the alerts."
    )
    parser.add_argument("--check", action="store_true", help="write nothing, and say which would be written otherwise")
    check = parser.parse_args(arguments).check
    differ = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    for path in differ:
        if check:
            print(f"{path}: differs from what it is written from; run `python -m examples.manifests`", file=sys.stderr)
        else:
            path.write_text(files()[path])
            print(f"wrote {path}")
    return 1 if check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
