#!/usr/bin/env bash
# Start x prefill and y decode instances and the router, wait until they serve, and stop all on Ctrl-C.
#
#   examples/launch_xpyd.sh --model Qwen/Qwen3-0.6B --prefills 2 --decodes 2            # on GPUs 0 to 3
#   examples/launch_xpyd.sh --cpu --model .cache/models/gqa --prefills 1 --decodes 2    # no GPU needed
#   examples/launch_xpyd.sh --prefill-tp 2 --decode-tp 4 --mode push --transport mooncake
#
# Several hosts: the same script on each, with --only and the address by which the others reach this host, and keys
# (vllm-pd keygen) by which the instances know each other.
#
#   10.0.0.7$ examples/launch_xpyd.sh --only prefill --prefills 2 --host 10.0.0.7 --extra '"side_channel_keys": "keys"'
#   10.0.0.8$ examples/launch_xpyd.sh --only decode  --decodes 1  --host 10.0.0.8 --extra '"side_channel_keys": "keys"'
#   10.0.0.9$ examples/launch_xpyd.sh --only router  --host 10.0.0.9 --instance http://10.0.0.7:8100 \
#                 --instance http://10.0.0.7:8101 --instance http://10.0.0.8:8200
#
# Options (default): each takes the next word; those marked * exist for --prefill-… and --decode-… alike.
#   --model NAME      (Qwen/Qwen3-0.6B)        --prefills X, --decodes Y  (1, 1)   how many instances
#   --prefill-tp N *  (1)  --prefill-pp N *  (1)       tensor and pipeline parallel size
#   --prefill-block-size N *  (vLLM's)         --prefill-layout NHD|HND *  (vLLM's)
#   --prefill-flags 'WORDS' *  ()              more words for vllm serve, split at spaces; --flags: for both
#   --transport nixl|mooncake  (nixl)          --mode pull|push|auto  (pull)
#   --extra JSON  ()       more members of kv_connector_extra_config, e.g. '"kv_lease_duration": 60'
#   --cpu                  no GPUs: float32, eager, 384 MiB of cache per instance
#   --gpus LIST  (all)     GPUs to share out, in order: prefill instances first
#   --host ADDRESS  (127.0.0.1)                --port N  (8000)  router;  --admin-port N  (none)
#   --prefill-port N *  (8100, 8200)           --side-channel-port N  (5600)  first of 20 for each instance
#   --only prefill|decode|router               --instance URL  for --only router; repeat
#   --logs DIR  (out/launch)   one file per process      --timeout SECONDS  (900)  until all serve
#   --dry-run              print the commands and start nothing
#
# Needs vllm and vllm-pd (pip install '.[nixl,proxy]') on PATH.
set -euo pipefail

model=Qwen/Qwen3-0.6B transport=nixl mode=pull extra='' host=127.0.0.1 port=8000 admin_port='' only=''
cpu='' gpus='' logs=out/launch timeout=900 dry_run='' flags='' side_channel_port=5600
instances=()
declare -A count=([prefill]=1 [decode]=1) tp=([prefill]=1 [decode]=1) pp=([prefill]=1 [decode]=1)
declare -A block_size=([prefill]='' [decode]='') layout=([prefill]='' [decode]='') more=([prefill]='' [decode]='')
declare -A first_port=([prefill]=8100 [decode]=8200) role=([prefill]=kv_producer [decode]=kv_consumer)

fail() {
    echo "launch: $*" >&2
    exit 2
}

while (($#)); do
    case $1 in
        -h | --help) sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
        --cpu) cpu=1; shift; continue ;;
        --dry-run) dry_run=1; shift; continue ;;
        --*) (($# > 1)) || fail "$1 needs a value" ;;&
        --prefill-* | --decode-*) side=${1#--} side=${side%%-*} ;;&
        --model) model=$2 ;;
        --prefills) count[prefill]=$2 ;;
        --decodes) count[decode]=$2 ;;
        --*-tp) tp[$side]=$2 ;;
        --*-pp) pp[$side]=$2 ;;
        --*-block-size) block_size[$side]=$2 ;;
        --*-layout) layout[$side]=$2 ;;
        --prefill-flags | --decode-flags) more[$side]=$2 ;;
        --prefill-port | --decode-port) first_port[$side]=$2 ;;
        --flags) flags=$2 ;;
        --transport) transport=$2 ;;
        --mode) mode=$2 ;;
        --extra) extra=$2 ;;
        --gpus) gpus=$2 ;;
        --host) host=$2 ;;
        --port) port=$2 ;;
        --admin-port) admin_port=$2 ;;
        --side-channel-port) side_channel_port=$2 ;;
        --only) only=$2 ;;
        --instance) instances+=("$2") ;;
        --logs) logs=$2 ;;
        --timeout) timeout=$2 ;;
        *) fail "unknown option $1; see --help" ;;
    esac
    shift 2
done

for number in "${count[@]}" "${tp[@]}" "${pp[@]}" "$port" "$timeout" "$side_channel_port" "${first_port[@]}"; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || fail "'$number' is not a positive number"
done
case $only in
    '' | prefill | decode | router) ;;
    *) fail "--only $only: prefill, decode or router" ;;
esac
[[ -z $only && ${#instances[@]} -gt 0 ]] && fail "--instance is for --only router"
[[ $only == router && ${#instances[@]} -eq 0 ]] && fail "--only router needs --instance URL, one for each instance"

# -- what to start: parallel arrays of names, URLs and the files that hold their commands' words ----------------------
names=() urls=() pids=() ports=()
commands=$(mktemp -d)
trap 'rm -rf "$commands"' EXIT

take() { # a port that something here will listen on
    local other
    for other in "${ports[@]}"; do
        [[ $other != "$1" ]] || fail "port $1 is to be used twice; see --port, --prefill-port, --decode-port, --side-channel-port"
    done
    ports+=("$1")
}

add() { # name, URL, words of the command
    names+=("$1")
    urls+=("$2")
    printf '%s\0' "${@:3}" >"$commands/$1"
}

if [[ -z $gpus && -z $cpu && $only != router ]]; then
    gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,) ||
        fail "nvidia-smi names no GPUs; give --gpus 0,1,… or --cpu"
fi
IFS=, read -ra free_gpus <<<"$gpus"

add_instance() { # side, index
    local side=$1 index=$2 needed
    local at=$((first_port[$side] + index)) words=() environment=()
    local side_channel=$((side_channel_port + 20 * index))
    if [[ $side == decode && -z $only ]]; then side_channel=$((side_channel + 20 * count[prefill])); fi
    local transfer
    transfer=$(printf '{"kv_connector":"PDConnector","kv_role":"%s","kv_connector_extra_config":{%s}}' "${role[$side]}" \
        "$(printf '"transport":"%s","mode":"%s","side_channel_host":"%s","side_channel_port":%d%s' \
            "$transport" "$mode" "$host" "$side_channel" "${extra:+,$extra}")")
    words=(vllm serve "$model" --host "$host" --port "$at" --kv-transfer-config "$transfer")
    words+=(--tensor-parallel-size "${tp[$side]}" --pipeline-parallel-size "${pp[$side]}")
    [[ -n ${block_size[$side]} ]] && words+=(--block-size "${block_size[$side]}")
    [[ -n ${layout[$side]} ]] && environment+=("VLLM_KV_CACHE_LAYOUT=${layout[$side]}")
    if [[ -n $cpu ]]; then
        # Threads of vLLM's own choice would share cores between instances; compiling the sampler takes minutes.
        environment+=(VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1)
        words+=(--enforce-eager --dtype float32 --kv-cache-memory-bytes $((384 << 20)))
    else
        needed=$((tp[$side] * pp[$side]))
        ((${#free_gpus[@]} >= needed)) || fail "--gpus $gpus: none left for $side $index, which needs $needed"
        environment+=("CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${free_gpus[*]:0:needed}")")
        free_gpus=("${free_gpus[@]:needed}")
    fi
    # Splitting at spaces is what the options promise.
    # shellcheck disable=SC2206
    words+=($flags ${more[$side]})
    take "$at"
    # A decode instance that only reads does not listen there.
    if [[ $side == prefill || $mode != pull ]]; then take "$side_channel"; fi
    add "$side-$index" "http://$host:$at" env "${environment[@]}" "${words[@]}"
    instances+=("http://$host:$at")
}

for side in prefill decode; do
    [[ -n $only && $only != "$side" ]] && continue
    for ((index = 0; index < count[$side]; index++)); do
        add_instance "$side" "$index"
    done
done
if [[ -z $only || $only == router ]]; then
    words=(vllm-pd proxy --host "$host" --port "$port")
    [[ -n $admin_port ]] && words+=(--admin-port "$admin_port")
    for url in "${instances[@]}"; do words+=(--instance "$url"); done
    take "$port"
    [[ -n $admin_port ]] && take "$admin_port"
    add router "http://$host:$port" "${words[@]}"
fi

if [[ -n $dry_run ]]; then
    for name in "${names[@]}"; do
        mapfile -d '' words <"$commands/$name"
        printf '%s:' "$name"
        printf ' %q' "${words[@]}"
        echo
    done
    exit 0
fi

# -- start, wait, stop ------------------------------------------------------------------------------------------------
for tool in curl setsid; do
    command -v "$tool" >/dev/null || fail "$tool is not installed"
done

# vLLM's servers share a port with whoever listens there already (SO_REUSEPORT), and each would get some of the requests.
for taken in "${ports[@]}"; do
    if (: <>"/dev/tcp/$host/$taken") 2>/dev/null; then
        fail "somebody listens on $host:$taken already; end it, or choose other ports (--port, --prefill-port, --decode-port," \
            "--side-channel-port)"
    fi
done

stop_all() {
    trap - EXIT INT TERM
    rm -rf "$commands"
    echo "launch: stopping ${#pids[@]} processes"
    # Each is a process group of its own, with all workers in it.
    for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
    for ((second = 0; second < 200; second++)); do
        local alive=''
        for pid in "${pids[@]}"; do kill -0 -- "-$pid" 2>/dev/null && alive=1; done
        [[ -z $alive ]] && return
        sleep 0.1
    done
    for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}
trap 'stop_all; exit 130' INT TERM
trap stop_all EXIT

mkdir -p "$logs"
start() { # index
    local words name=${names[$1]}
    mapfile -d '' words <"$commands/$name"
    setsid "${words[@]}" >"$logs/$name.log" 2>&1 </dev/null &
    pids+=($!)
}

give_up() { # index, what is the matter with it
    echo "launch: ${names[$1]} $2; the last lines of $logs/${names[$1]}.log:" >&2
    tail -n 20 "$logs/${names[$1]}.log" >&2
    exit 1
}

serves() { # index
    curl --silent --fail --max-time 5 --output /dev/null "${urls[$1]}/health"
}

wait_for() { # indices
    local waiting=("$@") still shown=0
    while ((${#waiting[@]})); do
        still=()
        for i in "${waiting[@]}"; do
            kill -0 "${pids[i]}" 2>/dev/null || give_up "$i" ended
            if serves "$i"; then
                echo "launch: ${names[i]} serves at ${urls[i]} after $SECONDS s"
            else
                still+=("$i")
            fi
        done
        waiting=("${still[@]}")
        ((${#waiting[@]})) || return 0
        if ((SECONDS > timeout)); then
            give_up "${waiting[0]}" "is not ready after $timeout s"
        fi
        if ((SECONDS >= shown + 10)); then
            shown=$SECONDS
            for i in "${waiting[@]}"; do
                echo "launch: $SECONDS s, ${names[i]}: $(tail -n 1 "$logs/${names[i]}.log" | cut -c 1-120)"
            done
        fi
        sleep 0.5
    done
}

SECONDS=0
echo "launch: starting ${names[*]}; logs in $logs"
engines=()
for i in "${!names[@]}"; do
    [[ ${names[i]} == router ]] && continue
    start "$i"
    engines+=("$i")
done
((${#engines[@]})) && wait_for "${engines[@]}"
last=$((${#names[@]} - 1))
if [[ ${names[last]} == router ]]; then
    start "$last"
    wait_for "$last"
    echo "launch: try  curl http://$host:$port/v1/completions -H 'Content-Type: application/json'" \
        "-d '{\"model\": \"$model\", \"prompt\": \"P/D\", \"max_tokens\": 8}'"
fi
echo "launch: ready; Ctrl-C stops everything"
while true; do
    for i in "${!names[@]}"; do
        kill -0 "${pids[i]}" 2>/dev/null || give_up "$i" ended
    done
    # In the background, because bash runs no trap while it waits for a process in the foreground.
    sleep 1 &
    wait $!
done
