#!/usr/bin/env bash
# Checks a machine with one or more GPUs: builds with CUDA, runs the GPU tests, and trains the main
# example on one GPU and on all GPUs.
#
#   tools/gpu_check.sh [--gpus N] [FOLDER] [pytest arguments]
#
# With --gpus N, runs after the build only what needs several GPUs: the tests of sharding and
# checkpoints on at most N ranks, the example, a sharded step, and syncs of replicas.
# Logs and the example's figures (JSON) are written to FOLDER (default: build/gpu_check). The Python on
# PATH must have torch for CUDA, TorchRec, fbgemm-gpu, pybind11 and pytest. If .gpu/activate.sh exists,
# it is sourced first; wheels in .gpu/wheels are added, for machines without access to a package index.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

many=0
if [[ ${1:-} == --gpus ]]; then
  many=${2:-}
  if ! [[ $many =~ ^[1-9][0-9]*$ ]]; then
    echo "error: --gpus is '$many', but must be a positive number." >&2
    exit 2
  fi
  shift 2
fi
out=${1:-build/gpu_check}
shift || true
mkdir -p "$out"
status=0

if [[ -f .gpu/activate.sh ]]; then
  # shellcheck disable=SC1091
  . .gpu/activate.sh
fi
if compgen -G '.gpu/wheels/*.whl' >/dev/null; then
  site=$(mktemp -d)
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" .gpu/wheels/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

step() { # step NAME COMMAND...: runs it, keeps its log, says how long it took
  local name=$1 begin=$SECONDS
  shift
  "$@" >"$out/$name.log" 2>&1
  local code=$?
  echo "== $name: exit $code, $((SECONDS - begin)) s"
  if ((code)); then
    status=1
    tail -n 40 "$out/$name.log"
  fi
}

if ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "error: this check needs a CUDA GPU and a torch built for CUDA, and python3 here has not both." >&2
  exit 2
fi
python3 -c 'import torch; print(torch.__version__, torch.cuda.device_count(), torch.cuda.get_device_name())'
step build env TORCHREC_HKV_CUDA=1 python3 setup.py build_ext --inplace
found=$(python3 -c 'import torch; print(torch.cuda.device_count())')
if ((many > found)); then
  echo "error: --gpus is $many, but this machine has $found." >&2
  exit 2
fi
if ((many)); then
  CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((many - 1)))
  export CUDA_VISIBLE_DEVICES
  run=(python3 -m torch.distributed.run --nproc_per_node "$many")
  step tests python3 -m pytest -m gpu -q tests/sharding tests/checkpoint tests/planner "$@"
  step sharded_step "${run[@]}" -m benchmarks.sharded_step --out "$out/sharded_step.csv"
  step sync "${run[@]}" -m benchmarks.sync --rows 8388608 --out "$out/sync.csv"
else
  step tests python3 -m pytest -m gpu -q "$@"
fi
tail -n 3 "$out/tests.log"

gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
if ! data=$(compgen -G '.gpu/wheels/recbole-*.whl' || compgen -G '.data/recbole-*.whl'); then
  echo "error: the example's data, the recbole wheel, is neither in .gpu/wheels nor in .data." >&2
  exit 1
fi
numbers=$(printf '1\n%s\n' "$gpus" | sort -nu)
for n in $( ((many)) && echo "$many" || echo "$numbers"); do
  step "example_$n" python3 -m torch.distributed.run --nproc_per_node "$n" \
    examples/train_movielens.py --data "$data" --json "$out/example_$n.json"
  tail -n 12 "$out/example_$n.log"
done
exit $status
