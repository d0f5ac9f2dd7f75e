#!/usr/bin/env bash
# Runs tests under a sanitizer. Exits with an error if a test fails or the sanitizer reports an error.
#
#   tools/sanitize.sh cpu       [pytest arguments]   the address sanitizer, on a CPU build
#   tools/sanitize.sh thread    [pytest arguments]   the thread sanitizer, on a CPU build
#   tools/sanitize.sh memcheck  [pytest arguments]   compute-sanitizer, on the GPU tests
#   tools/sanitize.sh racecheck [pytest arguments]   the same, for races in shared memory
#
# Without arguments, runs tests/hash_table and tests/tensor_train. Logs are written to
# build/sanitize/NAME.
#
# cpu and thread build in a copy of the tree, in build/sanitize/NAME, and need GCC with its sanitizers'
# libraries. They only check this project, because Python and torch are not built for a sanitizer.
# MAX_JOBS: number of concurrent compilations.
#
# memcheck and racecheck need a CUDA build in place (make build); with TORCHREC_HKV_DEBUG=1, reports
# have line numbers. They run each test file in its own process. TORCHREC_HKV_SANITIZE_JOBS: number of
# concurrent processes, 4 by default; TORCHREC_HKV_SANITIZE_SECONDS: time limit of a process, 1200 by
# default. A process that exceeds it is ended and listed, and counts as an error. With
# PYTORCH_NO_CUDA_MEMORY_CACHING=1, memcheck sees the end of every tensor; tests of CUDA graphs can't
# run with it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  sed -n '2,/^set /p' "${BASH_SOURCE[0]}" | sed '$d; s/^# \{0,1\}//' >&2
  exit 2
}

(($#)) || usage
kind=$1
shift
case $kind in cpu | thread | memcheck | racecheck) ;; *) usage ;; esac
tests=("$@")
((${#tests[@]})) || tests=(tests/hash_table tests/tensor_train)
python=${PYTHON:-python3}
out=$PWD/build/sanitize/$kind
mkdir -p "$out"
rm -f "$out"/report* "$out"/*.log

# Tests of the process's memory and time, which a sanitizer multiplies.
skipped=(
  --deselect tests/hash_table/files/test_bounded_memory.py::test_device_memory
  --deselect tests/hash_table/files/test_bounded_memory.py::test_host_memory
  --deselect tests/hash_table/growth/test_memory.py::test_host_memory
  --deselect tests/tensor_train/test_kept_memory.py::test_no_fresh_pages
)

run_cpu() { # run_cpu SANITIZER LIBRARY
  local sanitizer=$1 library libstdcxx
  library=$("${CXX:-g++}" -print-file-name="$2")
  libstdcxx=$("${CXX:-g++}" -print-file-name=libstdc++.so.6)
  if [[ $library != /* ]]; then
    echo "error: $2 was not found: it comes with GCC's sanitizers." >&2
    exit 2
  fi
  local tree=$out/tree
  mkdir -p "$tree"
  # Copies everything except build outputs again, with modification times, so that only changed
  # sources are compiled again.
  find "$tree" -mindepth 1 -maxdepth 1 ! -name build ! -name torchrec_hkv -exec rm -rf {} +
  find "$tree" -path "$tree/torchrec_hkv/*" -name '*.py' -delete
  git ls-files -z --cached --others --exclude-standard | xargs -0 cp -p --parents -t "$tree"
  cd "$tree" || exit 2
  echo "building for the $sanitizer sanitizer"
  if ! TORCHREC_HKV_CUDA=0 TORCHREC_HKV_SANITIZE=$sanitizer \
    "$python" setup.py build_ext --inplace >"$out/build.log" 2>&1; then
    tail -n 60 "$out/build.log" >&2
    exit 1
  fi
  # The sanitizer's library must be loaded before all others, and the C++ runtime before torch loads
  # it, because the sanitizer sets up its wrappers of the runtime's functions at start.
  #
  # Leaks are not checked, because an interpreter frees little when it ends. The thread sanitizer
  # does not see the synchronization in libraries that are not built for it, such as torch's thread
  # pool, so it ignores races inside of them.
  local log=log_path=$out/report:exitcode=99
  env LD_PRELOAD="$library $libstdcxx" \
    ASAN_OPTIONS="detect_leaks=0:$log" \
    TSAN_OPTIONS="ignore_noninstrumented_modules=1:$log" \
    PYTHONPATH="$tree" \
    "$python" -m pytest -q -m "not gpu" -o timeout=3600 "${skipped[@]}" "${tests[@]}"
}

# One process per test file, because kernels are a few hundred times slower under compute-sanitizer.
run_gpu() {
  local jobs=${TORCHREC_HKV_SANITIZE_JOBS:-4} seconds=${TORCHREC_HKV_SANITIZE_SECONDS:-1200}
  local sanitizer=${CUDA_HOME:+$CUDA_HOME/bin/}compute-sanitizer
  if ! command -v "$sanitizer" >/dev/null; then
    echo "error: $sanitizer was not found: it comes with the CUDA toolkit." >&2
    exit 2
  fi
  # Separates test names and files from options, which every process gets.
  local paths=() options=()
  local argument
  for argument in "${tests[@]}"; do
    if [[ -e ${argument%%::*} ]]; then paths+=("$argument"); else options+=("$argument"); fi
  done
  ((${#paths[@]})) || paths=(tests/hash_table tests/tensor_train)
  local path
  for path in "${paths[@]}"; do
    if [[ -d $path ]]; then
      find "$path" -name 'test_*.py' | sort
    else
      echo "$path"
    fi
  done >"$out/files.txt"
  echo "$(wc -l <"$out/files.txt") files under compute-sanitizer $kind, $jobs at a time"
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  # Without host backtraces: to read Python's frames, the sanitizer (2025.3) takes references to them
  # and keeps these, so that tests of objects that end with their last reference fail.
  # shellcheck disable=SC2016
  xargs -a "$out/files.txt" -P "$jobs" -I{} bash -c '
    file=$1 out=$2 seconds=$3 sanitizer=$4 kind=$5 python=$6
    shift 6
    name=${file//\//.}
    begin=$SECONDS
    timeout --kill-after=30 "$seconds" "$sanitizer" --tool "$kind" --error-exitcode 99 \
      --show-backtrace device --target-processes all --log-file "$out/report.$name" \
      "$python" -m pytest -q -m gpu -o timeout="$seconds" "$@" "$file" >"$out/$name.log" 2>&1
    code=$?
    # 5: the file has no test that needs a GPU.
    case $code in
      0 | 5) result=clean ;;
      99) result="reported" ;;
      124 | 137) result="ended after $seconds s" ;;
      *) result="failed ($code)" ;;
    esac
    echo "$result: $file, $((SECONDS - begin)) s"
    [[ $result == clean ]]
  ' bash {} "$out" "$seconds" "$sanitizer" "$kind" "$python" "${skipped[@]}" \
    ${options[@]+"${options[@]}"} | tee "$out/summary.log"
  ! grep -qv '^clean' "$out/summary.log"
}

status=0
case $kind in
  cpu) run_cpu address libasan.so || status=1 ;;
  thread) run_cpu thread libtsan.so || status=1 ;;
  *) run_gpu || status=1 ;;
esac

if [[ $kind == cpu || $kind == thread ]]; then
  for report in "$out"/report*; do
    [[ -e $report ]] || continue
    status=1
    echo "== $report"
    head -n 60 "$report"
  done
elif ((status)); then
  for report in "$out"/report*; do
    [[ -e $report ]] || continue
    grep -q 'ERROR SUMMARY: 0 errors' "$report" || { echo "== $report"; head -n 40 "$report"; }
  done
fi
((status)) || echo "clean: $kind"
exit $status
