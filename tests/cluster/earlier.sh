#!/usr/bin/env bash
# The program and the chart of an earlier commit: what an upgrade begins from. What is there already is left alone. The
# dependencies are those that this checkout has built; where they differ they are built besides.
#
# usage: earlier.sh COMMIT     -> .kernelfleet/earlier/COMMIT/{source,kernelfleet}
. "$(dirname "$0")/lib.sh"

commit=${1:?usage: earlier.sh COMMIT}
folder=$root/.kernelfleet/earlier/$commit
[ -x "$folder/kernelfleet" ] && exit 0
git -C "$root" cat-file -e "$commit^{commit}" 2>/dev/null ||
    stop "this clone doesn't have the commit $commit, which an upgrade begins from" "a shallow clone: git fetch --unshallow"
began=$(date +%s)
rm -rf "$folder"
mkdir -p "$folder/source"
git -C "$root" archive "$commit" | tar -x -C "$folder/source"
say "building the program of $commit"
# In this checkout's own folder of outputs, for the dependencies; its program is put back.
target=${CARGO_TARGET_DIR:-$root/target}
[ ! -f "$target/debug/kernelfleet" ] || cp -p "$target/debug/kernelfleet" "$folder/ours"
CARGO_INCREMENTAL=0 cargo build --quiet --locked --manifest-path "$folder/source/Cargo.toml" --target-dir "$target" --bin kernelfleet ||
    stop "the program of $commit did not build (the compiler's words are above)"
cp -p "$target/debug/kernelfleet" "$folder/kernelfleet.part"
[ ! -f "$folder/ours" ] || mv -f "$folder/ours" "$target/debug/kernelfleet"
mv "$folder/kernelfleet.part" "$folder/kernelfleet"
say "the program of $commit in $(($(date +%s) - began)) s"
