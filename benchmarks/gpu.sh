#!/usr/bin/env bash
# The tests that need a GPU and the benchmark of the kernels: at most four minutes on one GPU, no
# installs, no network. What it finds lands in one folder; a part that fails does not stop the rest,
# and is named in the summary at the end.
#
#     bash benchmarks/gpu.sh [folder]
#
# The machine needs torch, Triton, pytest, pytest-timeout, hypothesis and numpy. For one that lacks
# the pure Python ones, bring them along:
#
#     pip install --target .gpu-deps pytest pytest-timeout hypothesis
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-gpu-results}
mkdir -p "$out"
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/.gpu-deps" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
failed=()

part() {  # part NAME SECONDS COMMAND...
    local name=$1 limit=$2 start=$SECONDS status=0
    shift 2
    echo "== $name"
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.log" || status=$?
    [ "$status" -eq 0 ] || failed+=("$name")
    printf '%s\t%s\t%ss\n' "$name" "$([ "$status" -eq 0 ] && echo ok || echo "failed ($status)")" \
        "$((SECONDS - start))" >>"$out/summary.tsv"
}

: >"$out/summary.tsv"
part machine 20 "$python" -c "import torch, triton
print('torch', torch.__version__, 'triton', triton.__version__, torch.cuda.get_device_name())"
part tests 110 "$python" -m pytest -q -m gpu tests/test_kernels_gpu.py -p no:cacheprovider
# pytest is content when every test is skipped.
grep -qE '[0-9]+ passed' "$out/tests.log" || failed+=("tests: none passed")
part bench 100 "$python" benchmarks/bench_kernels.py --reps 10 --out "$out/kernels.csv"

echo "== summary"
grep -h 'flatten is' "$out/bench.log"
cat "$out/summary.tsv"
if [ "${#failed[@]}" -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
