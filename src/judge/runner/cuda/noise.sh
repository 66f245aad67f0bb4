#!/bin/sh
# Makes noise.ptx and selftest.ptx from their sources; needs nvcc 13 on PATH. The version is lowered to the
# oldest that has every instruction used, so that older drivers take it.
set -eu
cd "$(dirname "$0")"
for name in noise selftest; do
    nvcc -ptx -arch=compute_75 -O3 -o "$name.ptx.new" "$name.cu"
    sed 's/^\.version .*/.version 6.4/; /^\/\//d' "$name.ptx.new" | sed '/./,$!d' > "$name.ptx"
    rm "$name.ptx.new"
done
