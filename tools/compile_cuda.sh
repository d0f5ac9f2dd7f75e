#!/usr/bin/env bash
# Compiles every CUDA source of csrc/ with warnings as errors, and keeps no output. It needs nvcc, but
# no GPU and no torch. Without nvcc, it prints a message and succeeds.
#
# Compiles for sm_90, and sources that depend on the architecture for all supported architectures.
# With TORCHREC_HKV_RELEASE=1, compiles all sources for all supported architectures.
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
# Groups of sources that setup.py compiles together; other sources are compiled alone.
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
  # Object names contain the folder, because files in different folders may have the same name.
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
