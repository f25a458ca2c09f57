#!/usr/bin/env python3
"""Start prefill and decode instances and the router on this host, wait until they serve, and end all on Ctrl-C.

    examples/launch_pd.py --model Qwen/Qwen3-0.6B                       # one of each, on GPUs 0 and 1
    examples/launch_pd.py --cpu --model .cache/models/gqa               # no GPU needed
    examples/launch_pd.py --prefills 2 --decodes 2 --prefill-tp 2 --mode push --transport mooncake

Several hosts: the same on each, with --only and the address by which the others reach this host, and keys
(vllm-pd keygen) by which the instances know each other.

    10.0.0.7$ examples/launch_pd.py --only prefill --prefills 2 --host 10.0.0.7 --extra '"side_channel_keys": "keys"'
    10.0.0.8$ examples/launch_pd.py --only decode  --decodes 1  --host 10.0.0.8 --extra '"side_channel_keys": "keys"'
    10.0.0.9$ examples/launch_pd.py --only router  --host 10.0.0.9 --instance http://10.0.0.7:8100 \\
                  --instance http://10.0.0.7:8101 --instance http://10.0.0.8:8200

Needs vllm and vllm-pd (pip install '.[nixl,proxy]') on PATH, and nothing else than Python itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import roles
from examples.launch import PortError, Servers, Spec, StartError, refuse_ports_twice
from examples.roles import DECODE, PREFILL, ROLES, Role
from examples.stages import Progress

ROUTER = "router"
SIZES: Final = {
    "tp": ("tensor-parallel size", "--tensor-parallel-size"),
    "pp": ("pipeline-parallel size", "--pipeline-parallel-size"),
    "dp": ("data-parallel size: engines behind one API", "--data-parallel-size"),
}
"""What an instance takes GPUs for: the option of a side, what it is, and vLLM's flag, which is also `-tp` and so on."""


class UsageError(Exception):
    """Options that contradict each other; nothing was started."""


def say(text: str) -> None:
    print(f"launch: {text}", flush=True)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def members(text: str) -> dict[str, Any]:
    """More members of an object, as JSON without its braces."""
    try:
        found: dict[str, Any] = json.loads(f"{{{text}}}")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} are not members of a JSON object: {error}") from error
    return found


def flags_of(text: str) -> list[str]:
    """The words of a command line."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} are no words of a command: {error}") from error


def parser() -> argparse.ArgumentParser:
    """The options; those of a role exist once for each."""
    first, _, rest = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    made = Parser(description=first, epilog=rest, formatter_class=form, allow_abbrev=False)
    made.add_argument("--model", default=roles.MODEL)
    for role in ROLES:
        side, name = made.add_argument_group(f"{role.name} instances"), role.name
        side.add_argument(f"--{name}s", type=positive, default=1, metavar="N", help="how many")
        for size, (text, _) in SIZES.items():
            side.add_argument(f"--{name}-{size}", type=positive, default=1, metavar="N", help=text)
        side.add_argument(f"--{name}-block-size", type=positive, metavar="N", help="tokens; vLLM's unless set")
        side.add_argument(f"--{name}-layout", metavar="LAYOUT", help="NHD, HND, …; vLLM's unless set")
        more = "more words for vllm serve"
        side.add_argument(f"--{name}-flags", type=flags_of, default="", metavar="WORDS", help=more)
        side.add_argument(f"--{name}-port", type=positive, default=role.port, metavar="PORT", help="of the first")
    made.add_argument("--flags", type=flags_of, default="", metavar="WORDS", help=f"{more}, of all instances")
    made.add_argument("--transport", choices=roles.TRANSPORTS, default=roles.TRANSPORTS[0])
    made.add_argument("--mode", choices=roles.MODES, default=roles.MODES[0])
    extra = "more members of kv_connector_extra_config, such as '\"kv_lease_duration\": 60'"
    made.add_argument("--extra", type=members, default={}, metavar="MEMBERS", help=extra)
    made.add_argument("--cpu", action="store_true", help="no GPUs: float32, eager, 384 MiB of cache per instance")
    gpus = "to share out, prefill first (default: CUDA_VISIBLE_DEVICES, or all that nvidia-smi names)"
    made.add_argument("--gpus", metavar="LIST", help=gpus)
    made.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="by which the others reach this host")
    made.add_argument("--port", type=positive, default=roles.ROUTER_PORT, help="of the router")
    made.add_argument("--admin-port", type=positive, metavar="PORT", help="of the router; none unless set")
    step = roles.SIDE_CHANNEL_STEP
    channel = f"first of {step} for each instance, or of as many as it has data-parallel engines"
    made.add_argument(
        "--side-channel-port", type=positive, default=roles.SIDE_CHANNEL_PORT, metavar="PORT", help=channel
    )
    made.add_argument("--only", choices=(*(role.name for role in ROLES), ROUTER))
    made.add_argument("--instance", action="append", default=[], metavar="URL", help="for --only router; repeat")
    made.add_argument("--logs", type=Path, default=Path("out/launch"), metavar="DIRECTORY", help="a file per process")
    made.add_argument("--timeout", type=positive, default=900, metavar="SECONDS", help="until all serve")
    made.add_argument("--dry-run", action="store_true", help="print the commands and start nothing")
    return made


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Raises UsageError."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for at in range(len(words) - 1, 0, -1):
        # argparse takes a value that begins with a dash only in the same word.
        if words[at - 1].startswith("--") and words[at - 1].endswith("flags"):
            words[at - 1 : at + 1] = [f"{words[at - 1]}={words[at]}"]
    options = parser().parse_args(words)
    if (options.only == ROUTER) != bool(options.instance):
        raise UsageError("--only router needs --instance URL, one for each instance, and nothing else takes it")
    _refuse_sizes_in_flags(options)
    return options


def _refuse_sizes_in_flags(options: argparse.Namespace) -> None:
    for option, sides in (("flags", ROLES), *((f"{role.name}_flags", (role,)) for role in ROLES)):
        words = getattr(options, option)
        for size, (_, flag) in SIZES.items():
            if (value := roles.last_value(words, flag, f"-{size}")) is not None:
                instead = " and ".join(f"--{side.name}-{size} {value}" for side in sides)
                raise UsageError(
                    f"--{option.replace('_', '-')} has {flag} {value}, for which no GPUs would be set aside; "
                    f"give {instead} in its place"
                )


class Gpus:
    """The GPUs that are left; `--cpu` has none."""

    def __init__(self, options: argparse.Namespace):
        self._said, named = f"--gpus {options.gpus}", options.gpus or ""
        if options.gpus is None and not options.cpu and options.only != ROUTER:
            self._said, named = _all_gpus()
        self._left = [gpu for gpu in named.split(",") if gpu]

    def take(self, count: int, name: str) -> str:
        """The next `count`. Raises UsageError: there are fewer."""
        if len(self._left) < count:
            raise UsageError(f"{self._said}: {len(self._left)} left for {name}, which needs {count}")
        taken, self._left = self._left[:count], self._left[count:]
        return ",".join(taken)


def _all_gpus() -> tuple[str, str]:
    """Who names them, and their list."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible}", visible
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        found = ",".join(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split())
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError("nvidia-smi names no GPUs; give --gpus 0,1,… or --cpu") from error
    return f"nvidia-smi names {found}", found


def _engines(count: int, given: Sequence[str]) -> list[str]:
    """The flags of several engines. With several API servers none lets its requests end (`docs/elastic.md`)."""
    if count == 1:
        return []
    drains = roles.last_value(given, "--shutdown-timeout") not in (None, "0")
    servers = roles.last_value(given, "--api-server-count", "-asc")
    one = ["--api-server-count", "1"] if drains and servers is None else []
    return ["--data-parallel-size", str(count), *one]


def instance_spec(options: argparse.Namespace, role: Role, index: int, gpus: Gpus) -> Spec:
    """What to start as the instance `index` of a side."""
    own = {name: getattr(options, f"{role.name}_{name}") for name in (*SIZES, "block_size", "layout", "flags", "port")}
    name, port = f"{role.name}-{index}", own["port"] + index
    # Decode's side channels come after those of prefill on the same host.
    before = options.prefills if role is DECODE and options.only is None else 0
    step = max(roles.SIDE_CHANNEL_STEP, options.prefill_dp, options.decode_dp)
    channel = options.side_channel_port + step * (before + index)
    flags = ["--tensor-parallel-size", str(own["tp"]), "--pipeline-parallel-size", str(own["pp"])]
    flags += ["--block-size", str(own["block_size"])] if own["block_size"] else []
    environment = {"VLLM_KV_CACHE_LAYOUT": own["layout"]} if own["layout"] else {}
    if options.cpu:
        environment |= roles.CPU_ENVIRONMENT
        flags += [*roles.CPU_FLAGS, *roles.cache_flags()]
    else:
        environment["CUDA_VISIBLE_DEVICES"] = gpus.take(own["tp"] * own["pp"] * own["dp"], name)
    given = [*options.flags, *own["flags"]]
    flags += [*_engines(own["dp"], given), *given]
    place = {"side_channel_host": options.host, "side_channel_port": channel}
    transfer = roles.transfer_config(role, options.transport, options.mode, {**place, **options.extra})
    return Spec(
        name,
        tuple(roles.serve_words(options.model, options.host, port, transfer, flags)),
        port,
        environment,
        options.host,
        also_listens=tuple(range(channel, channel + own["dp"])) if role.listens(options.mode) else (),
        what=" ".join([name, options.model, *flags]),
    )


def specs_of(options: argparse.Namespace) -> tuple[list[Spec], list[Spec]]:
    """The instances to start, and the router, if it is to be started here.

    Raises:
        UsageError: there are too few GPUs.
        PortError: a port would be used twice.
    """
    gpus = Gpus(options)
    counts = {PREFILL: options.prefills, DECODE: options.decodes}
    here = [role for role in ROLES if options.only in (None, role.name)]
    instances = [instance_spec(options, role, index, gpus) for role in here for index in range(counts[role])]
    router = []
    if options.only in (None, ROUTER):
        admin = ["--admin-port", str(options.admin_port)] if options.admin_port else []
        # What instances may take to end is for the answers that pass through the router, too.
        most = max([spec.drains_for for spec in instances], default=0.0)
        admin += ["--shutdown-timeout", f"{most:.0f}"] if most else []
        urls = options.instance or [spec.url for spec in instances]
        words = roles.router_words(options.host, options.port, urls, admin)
        listens = (options.admin_port,) if options.admin_port else ()
        router = [Spec(ROUTER, tuple(words), options.port, {}, options.host, also_listens=listens)]
    refuse_ports_twice([*instances, *router])
    return instances, router


def shown(spec: Spec) -> str:
    """A line that starts it by hand."""
    environment = [f"{name}={value}" for name, value in spec.environment.items()]
    return f"{spec.name}: {shlex.join([*(['env', *environment] if environment else []), *spec.command])}"


def run(options: argparse.Namespace, instances: Sequence[Spec], router: Sequence[Spec]) -> int:
    """Start, wait, and watch until one ends or somebody ends this. The exit status."""
    specs = [*instances, *router]
    for program in {spec.command[0] for spec in specs}:
        if shutil.which(program) is None:
            raise UsageError(
                f"{program} is not on PATH; activate the environment that has it (pip install '.[nixl,proxy]')"
            )
    with Servers(options.logs) as servers:
        ending = Ending(servers, max(spec.drains_for for spec in specs))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, ending)
        servers.refuse_ports(specs)
        say(f"starting {', '.join(spec.name for spec in specs)}; logs in {options.logs}")
        progress = Progress(say, options.logs)
        servers.start(*instances, timeout=options.timeout, progress=progress)
        if not router:
            return _watch(servers)
        started = servers.start(*router, timeout=options.timeout, progress=progress)
        body = json.dumps({"model": options.model, "prompt": "P/D", "max_tokens": 8})
        say(f"try  curl {router[0].url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}")
        try:
            return _watch(servers)
        finally:
            servers.stop(*started)  # first, since instances that end take no second leg


def _watch(servers: Servers) -> int:
    say("ready; Ctrl-C stops everything")
    ended = servers.first_to_end()
    say(f"{ended.spec.name} ended with status {ended.status()}; its log {ended.log} ends with:")
    print(ended.log_tail(20), flush=True)
    return 1


class Ending:
    """What SIGINT and SIGTERM do: the first has everything end, another one, more than a second later, kills it."""

    def __init__(self, servers: Servers, drains_for: float):
        self._servers = servers
        self._drains_for = drains_for
        self._began: float | None = None

    def __call__(self, number: int, _: object) -> None:
        if self._began is not None:
            # One keystroke may come as two signals.
            self._servers.hurried = time.monotonic() > self._began + 1.0
            return
        self._began = time.monotonic()
        wait = f"; what has begun has {self._drains_for:.0f} s to end, and once more ends it now"
        say(f"stopping everything{wait if self._drains_for else ''}")
        sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = options_of(arguments)
        instances, router = specs_of(options)
        if options.dry_run:
            print(*map(shown, [*instances, *router]), sep="\n")
            return 0
        return run(options, instances, router)
    except (UsageError, PortError) as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
