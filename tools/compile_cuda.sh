#!/usr/bin/env bash
# Compiles every CUDA source of csrc/, warnings as errors, and keeps nothing: no GPU and no torch is
# needed, only nvcc. Without nvcc it says so and succeeds.
#
# Compiles for sm_90, and sources that differ by architecture for all that are supported.
# TORCHREC_HKV_RELEASE=1 compiles all sources for these.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
if ! command -v "$nvcc" >/dev/null; then
  echo "nvcc not found: the CUDA sources are not compiled."
  exit 0
fi

flags=(-O3 -std=c++20 -Icsrc -DTORCHREC_HKV_CUDA --expt-relaxed-constexpr)
flags+=(-Werror all-warnings -Xcompiler=-Wall,-Werror,-ffp-contract=off)

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# Sources that are compiled together, as in setup.py, and all others alone.
number=0
sources=()
while read -ra unit; do
  [[ ${#unit[@]} == 0 || ${unit[0]} == "#"* ]] && continue
  number=$((number + 1))
  printf '#include "%s"\n' "${unit[@]}" >"$out/unit_$number.cu"
  sources+=("$out/unit_$number.cu")
done <csrc/cuda_units.txt
while read -r source; do
  grep -qFw -- "${source#csrc/}" csrc/cuda_units.txt || sources+=("$source")
done < <(find csrc -name '*.cu' | sort)

compile() { # compile ARCHITECTURES SOURCE...
  local of=() sm
  for sm in $1; do of+=(-gencode "arch=compute_$sm,code=sm_$sm"); done
  echo "nvcc for sm_${1// /, sm_}: $(($# - 1)) compilations"
  # One object name a source, for files of the same name in different folders.
  printf '%s\n' "${@:2}" | xargs -r -P "$(nproc)" -I{} bash -c '
    source=$1; out=$2; shift 2
    "$@" -c "$source" -o "$out/${source//\//_}.o" || { echo "failed: $source"; exit 1; }
  ' bash {} "$out" "$nvcc" "${flags[@]}" "${of[@]}"
}

if [[ ${TORCHREC_HKV_RELEASE:-0} != 0 ]]; then
  compile "80 90 100" "${sources[@]}"
else
  compile 90 "${sources[@]}"
  mapfile -t differing < <(grep -rl --include='*.cu' __CUDA_ARCH__ csrc | sort)
  compile "80 100" "${differing[@]}"
fi
