#!/usr/bin/env bash
# Builds the three images from agent-image/Containerfile without a registry and lays them into the nodes' containerd. Needs
# root, and for the base image Debian's packages. The base and the layers above it are cached; an edit of the program costs
# some seconds. The judge's image comes without PyTorch: the test bed mounts this checkout's environment into it.
#
# usage: images.sh [PROGRAM]     target/release/kernelfleet if nothing is said
#   -> localhost/kernelfleet:dev, localhost/kernelfleet-sandbox:dev, localhost/kernelfleet-judge:dev
# With KERNELFLEET_IMAGE_TAG set, that instead of `dev`.
. "$(dirname "$0")/lib.sh"

program=${1:-$root/target/release/kernelfleet}
tag=${KERNELFLEET_IMAGE_TAG:-dev}
need_root
need python3:python3 buildah:buildah mmdebstrap:mmdebstrap ctr:containerd strip:binutils
[ -x "$program" ] || stop "no program $program" "make it with: make build"
[ -n "$(nodes)" ] || stop "no cluster is up" "start one with: make cluster"

store=$home/images
mkdir -p "$store/context/bin"
build() { buildah --root "$store/storage" --runroot "$run/buildah" --storage-driver overlay "$@"; }
base=docker.io/library/debian:12-slim
began=$(date +%s)

if ! build inspect --type image $base >/dev/null 2>&1; then
    say "making the base image (once, about a minute)"
    [ -f "$store/base.tar" ] || {
        # Its format is named: mmdebstrap takes any other ending than .tar for a folder.
        rm -rf "$store/base.tar" "$store/base.tar.part"
        mmdebstrap --mode=root --variant=minbase --format=tar --include=ca-certificates --quiet bookworm "$store/base.tar.part"
        mv "$store/base.tar.part" "$store/base.tar"
    }
    container=$(build from scratch)
    build add --quiet "$container" "$store/base.tar" / >/dev/null
    build config --cmd /bin/bash "$container"
    build commit --quiet --rm "$container" $base >/dev/null
    rm "$store/base.tar"
fi

# A context of its own: only what the images take, and the program without symbols.
rm -rf "$store/context/agent-image"
mkdir "$store/context/agent-image"
# What it copies from the checkout, as it says itself.
for part in $(sed -n 's/^COPY \(agent-image\/[^ ]*\) .*/\1/p' "$root/agent-image/Containerfile" | sort -u); do
    cp -a "$root/$part" "$store/context/agent-image/"
done
find "$store/context" -name __pycache__ -prune -exec rm -rf {} +
strip -o "$store/context/bin/kernelfleet" "$program"
for target in kernelfleet sandbox judge; do
    name=kernelfleet-$target
    [ $target = kernelfleet ] && name=kernelfleet
    build build --quiet --isolation chroot --pull-never --layers --network host --build-arg PROGRAM=bin/kernelfleet --build-arg PYTORCH=no \
        -f "$root/agent-image/Containerfile" --target $target -t "localhost/$name:$tag" "$store/context" >"$store/$target.log" 2>&1 || {
        tail -n 30 "$store/$target.log" >&2
        stop "the image $target did not build" "its whole output: $store/$target.log"
    }
    rm -rf "${store:?}/$target"
    build push --quiet --disable-compression "localhost/$name:$tag" "dir:$store/$target" >/dev/null
    # shellcheck disable=SC2046
    python3 "$here/load.py" "$store/$target" "localhost/$name:$tag" $(for n in $(nodes); do echo "$run/node$n/containerd.sock"; done)
    rm -rf "${store:?}/$target"
done
# Layers that no image has any more.
build rmi --prune >/dev/null 2>&1 || true
say "images of $(basename "$(dirname "$program")")/kernelfleet in $(($(date +%s) - began)) s"
