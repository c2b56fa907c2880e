#!/usr/bin/env bash
# Make the GPU environment that uv.lock holds (group `gpu`: verl, vLLM, flash-attn, liger), with this plugin in it.
#
#   bash examples/make_gpu_env.sh [DIRECTORY]    # .venv-gpu in this clone by default; nothing to do if it is up to date
#
# uv.lock names no host, so that it holds behind any mirror; for that `uv sync` and `uv run` cannot fetch by it. Its
# versions and hashes are exported instead, and installed from the index that uv is configured for.
# Several nodes: run this on each of them, with the same DIRECTORY (or once, on a file system that all of them have).
set -euo pipefail

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DIRECTORY=${1:-$REPOSITORY/.venv-gpu}
READY=$DIRECTORY/.ready
UV=$(command -v uv || echo "$REPOSITORY/.uv/bin/uv")

fail() { echo "make_gpu_env.sh: $*" >&2; exit 2; }
[[ -e $READY && ! $REPOSITORY/uv.lock -nt $READY ]] && exit 0
[[ -x $UV ]] || fail "uv is neither on the PATH nor in .uv/ of this clone. Install it: python3 -m pip install uv"

echo "==> the GPU environment in $DIRECTORY: torch with CUDA, verl and vLLM, 4 GB to fetch" >&2
"$UV" venv --quiet --clear --python 3.11 "$DIRECTORY"
"$UV" export --quiet --frozen --no-emit-project --project "$REPOSITORY" --group gpu -o "$DIRECTORY/requirements.txt"
install=("$UV" pip install --python "$DIRECTORY/bin/python" --no-deps)
locked=(--require-hashes --no-build-isolation -r "$DIRECTORY/requirements.txt")

# flash-attn comes as source alone. It is built against the torch that is there before it, with `wheel`, which its
# setup.py imports and does not ask for.
awk '/^[a-z0-9]/ {keep = !/^flash-attn==/} keep' "$DIRECTORY/requirements.txt" > "$DIRECTORY/without-flash-attn.txt"
"${install[@]}" --compile-bytecode --require-hashes -r "$DIRECTORY/without-flash-attn.txt"
"${install[@]}" --editable "$REPOSITORY"
"${install[@]}" wheel
if ! "${install[@]}" "${locked[@]}"; then
    cuda=$("$DIRECTORY/bin/python" -c 'import torch; print(torch.version.cuda)' 2> /dev/null || echo of torch)
    fail "flash-attn cannot be built; the rest is there. It needs the CUDA toolkit $cuda (CUDA_HOME: nvcc and headers) and
  a C++ compiler. Or install a wheel of it with $DIRECTORY/bin/python, then: touch $READY
  Or use an environment of your own that has verl, vLLM and flash-attn: VERL_USE_UV=0 PYTHON=..."
fi
touch "$READY"
