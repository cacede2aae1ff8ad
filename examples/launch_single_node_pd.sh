#!/usr/bin/env bash
# One prefill server, one decode server, a bootstrap server and sglang's router on one machine with TPU chips.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: MODEL=Qwen/Qwen3-8B examples/launch_single_node_pd.sh [-h] [--dry-run] [VLLM_OPTION...]

  bootstrap  :8000
  prefill    :7080  native transfer :9080  side channel :6080  on chips $PREFILL_CHIPS (default 0)
  decode     :7081  native transfer :9081  side channel :6081  on chips $DECODE_CHIPS (default 1)
  router     :8001  this is where clients go

Serves until Ctrl-C, or until one of the four ends; then it ends the others. Logs are in $LOG_DIR (default: a new
directory under /tmp). Further options go to both vLLM servers, e.g. --max-model-len 8192.
With --dry-run the four commands are printed and nothing is started.

Other variables: PYTHON (an interpreter with sgl-pd-connector[vllm,router]), BOOTSTRAP_PORT, PREFILL_PORT,
PREFILL_TRANSFER_PORT, PREFILL_SIDE_CHANNEL_PORT, DECODE_PORT, DECODE_TRANSFER_PORT, DECODE_SIDE_CHANNEL_PORT,
ROUTER_PORT, TRANSFER_LOG (a file for one JSON line per transfer). SGL_PD_CPU_EMULATION=1 runs it without a TPU, for tests.
HELP
}

dry_run=0
vllm_options=()
for arg in "$@"; do
  case "$arg" in
    -h|--help) usage; exit 0 ;;
    --dry-run) dry_run=1 ;;
    *) vllm_options+=("$arg") ;;
  esac
done

[ -n "${MODEL:-}" ] || { echo "launch_single_node_pd.sh: set MODEL to the path or name of a model (see -h)" >&2; exit 2; }
python=${PYTHON:-python3}
host=127.0.0.1
bootstrap_port=${BOOTSTRAP_PORT:-8000}
prefill_port=${PREFILL_PORT:-7080}
decode_port=${DECODE_PORT:-7081}
router_port=${ROUTER_PORT:-8001}

# settings TRANSFER_PORT SIDE_CHANNEL_PORT: kv_connector_extra_config of one server. Only P listens on the two ports today;
# D has them too so that a server can change its role without new firewall rules.
settings() {
  printf '{"bootstrap_addr":"%s:%s","transfer_port":%s,"side_channel_port":%s%s}' \
    "$host" "$bootstrap_port" "$1" "$2" "${TRANSFER_LOG:+,\"transfer_log\":\"$TRANSFER_LOG\"}"
}
transfer_config() { printf '{"kv_connector":"SglJaxConnector","kv_role":"%s","kv_connector_extra_config":%s}' "$1" "$2"; }

# chips LIST: the environment that shows a process some of the machine's chips, in one row.
chips() {
  [ "${SGL_PD_CPU_EMULATION:-0}" = 0 ] || return 0
  local count
  count=$(tr ',' '\n' <<<"$1" | wc -l)
  echo "TPU_VISIBLE_CHIPS=$1 TPU_CHIPS_PER_PROCESS_BOUNDS=1,$count,1 TPU_PROCESS_BOUNDS=1,1,1"
}

vllm=("$python" -m vllm.entrypoints.cli.main serve "$MODEL" --host "$host" "${vllm_options[@]}")
prefill_settings=$(settings "${PREFILL_TRANSFER_PORT:-9080}" "${PREFILL_SIDE_CHANNEL_PORT:-6080}")
decode_settings=$(settings "${DECODE_TRANSFER_PORT:-9081}" "${DECODE_SIDE_CHANNEL_PORT:-6081}")
read -ra prefill_chips <<<"$(chips "${PREFILL_CHIPS:-0}")"
read -ra decode_chips <<<"$(chips "${DECODE_CHIPS:-1}")"

bootstrap=("$python" -m sgl_pd_connector.cli.main bootstrap --host "$host" --port "$bootstrap_port")
prefill=(env "${prefill_chips[@]}" "${vllm[@]}" --port "$prefill_port"
  --kv-transfer-config "$(transfer_config kv_producer "$prefill_settings")")
decode=(env "${decode_chips[@]}" "${vllm[@]}" --port "$decode_port"
  --kv-transfer-config "$(transfer_config kv_consumer "$decode_settings")")
router=("$python" -m sglang_router.launch_router --mini-lb --pd-disaggregation --host "$host" --port "$router_port"
  --prefill "http://$host:$prefill_port" "$bootstrap_port" --decode "http://$host:$decode_port")

if [ "$dry_run" = 1 ]; then
  for name in bootstrap prefill decode router; do
    declare -n command=$name
    printf '%s:' "$name"
    printf ' %q' "${command[@]}"
    printf '\n'
  done
  exit 0
fi

log_dir=${LOG_DIR:-$(mktemp -d -t sgl-pd-XXXXXX)}
pids=()
# Each server leads a process group of its own, which is ended as a whole.
set -m
stop() {
  trap - EXIT
  trap '' INT TERM
  local pid
  for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  wait
  for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}
trap stop EXIT
trap 'exit 130' INT TERM

start() {
  local name=$1
  shift
  "$@" >"$log_dir/$name.log" 2>&1 &
  pids+=($!)
}
# ready NAME URL: waits until it serves; ends the script when one of the servers has ended.
ready() {
  local pid
  until "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$2" 2>/dev/null; do
    for pid in "${pids[@]}"; do
      kill -0 "$pid" 2>/dev/null || { echo "a server ended: see $log_dir" >&2; tail -n 5 "$log_dir"/*.log >&2; exit 1; }
    done
    sleep 1
  done
  echo "$1 is ready"
}

echo "logs are in $log_dir"
start bootstrap "${bootstrap[@]}"
ready bootstrap "http://$host:$bootstrap_port/health"
start prefill "${prefill[@]}"
start decode "${decode[@]}"
ready prefill "http://$host:$prefill_port/health"
ready decode "http://$host:$decode_port/health"
start router "${router[@]}"
ready router "http://$host:$router_port/health"
echo "serving at http://$host:$router_port, Ctrl-C stops everything"
wait -n
echo "a server ended: see $log_dir" >&2
exit 1
