#!/usr/bin/env bash
# Start one prefill and one decode instance and the router on this host; Ctrl-C stops all three.
#
#   examples/launch_1p1d.sh --model Qwen/Qwen3-0.6B             # on GPUs 0 and 1
#   examples/launch_1p1d.sh --cpu --model .cache/models/gqa     # no GPU needed
#   examples/launch_1p1d.sh --model Qwen/Qwen3-8B --prefill-tp 2 --decode-tp 1 --mode push
#
# Takes the options of launch_xpyd.sh; see examples/launch_xpyd.sh --help.
set -euo pipefail
exec "$(dirname "$0")/launch_xpyd.sh" "$@" --prefills 1 --decodes 1
