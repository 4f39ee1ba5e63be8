#!/usr/bin/env bash
# The tests that need a GPU, and the benchmarks of the kernels and of captured steps: at most six
# minutes on one GPU, so that a quarter of an hour with the machine is enough for a second run. No
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
    timeout -k 5 "$limit" "$@" 2>&1 | tee "$out/$name.log" || status=$?
    [ "$status" -eq 0 ] || failed+=("$name")
    printf '%s\t%s\t%ss\n' "$name" "$([ "$status" -eq 0 ] && echo ok || echo "failed ($status)")" \
        "$((SECONDS - start))" >>"$out/summary.tsv"
}

tests() {  # tests NAME SECONDS FILE...
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" -m pytest -q -m gpu "$@" -p no:cacheprovider
    # pytest is content when every test is skipped.
    grep -qE '[0-9]+ passed' "$out/$name.log" || failed+=("$name: none passed")
}

# The limits add up to six minutes.
: >"$out/summary.tsv"
part machine 10 "$python" -c "import torch, triton
print('torch', torch.__version__, 'triton', triton.__version__, torch.cuda.get_device_name())"
tests kernel_tests 90 tests/test_kernels_gpu.py
tests graph_tests 110 tests/test_graphs*.py -k "not compiled"
part kernel_bench 55 "$python" benchmarks/bench_kernels.py --reps 10 --out "$out/kernels.csv"
part graph_bench 55 "$python" benchmarks/bench_graph.py --modes eager captured --sessions 2 \
    --turns 6 --csv "$out/graph.csv"
tests compile_tests 40 tests/test_graphs_gpu.py -k compiled

echo "== summary"
grep -h 'flatten is' "$out/kernel_bench.log"
cut -d, -f1-7 "$out/graph.csv"
cat "$out/summary.tsv"
if [ "${#failed[@]}" -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
