#!/bin/bash
# Hearth on ARM, under emulation: Debian 12 for arm64 (the base of Raspberry Pi OS) in a folder of its own, where QEMU runs every
# program. Installs as README says, runs the demo, and compares with transformers and onnxruntime. Needs root and Debian. It shows
# neither speed nor kernels for instructions that QEMU's processor lacks, and its kernel is this machine's.
#
#   arm64.sh FOLDER [STEP...]    steps: root install demo exactness; by default all, in this order
set -euo pipefail

here=$(dirname "$(realpath "$0")")
source "$here/lib.sh"
skip_unless "Hearth on arm64" mmdebstrap arch-test qemu-user-static
if [[ ${HEARTH_ARM64_INSIDE:-} != 1 ]]; then # mounts and processes end with this one, at the latest after an hour
  exec env HEARTH_ARM64_INSIDE=1 timeout --kill-after=10 60m unshare --mount --pid --fork --mount-proc --kill-child "$0" "$@"
fi

source=$(realpath "$here/../..") folder=$(realpath -m "$1")
shift
steps=("$@")
((${#steps[@]})) || steps=(root install demo exactness)
root=$folder/root
mkdir -p "$folder"
# Compiling all modules takes longer here than the few that run. Deadlines are made for processors that are 10 times as fast.
PASSED=(PIP_NO_COMPILE=1 HEARTH_TEST_PATIENCE=10)

register() { # programs for arm64 start with QEMU, which the kernel opens now: the root needs no copy of it
  local table=/proc/sys/fs/binfmt_misc
  [[ -e $table/register ]] || mount -t binfmt_misc binfmt_misc "$table" || fail "this kernel lets nobody mount binfmt_misc"
  arch-test arm64 > /dev/null || tr -d '\n' < /usr/lib/binfmt.d/qemu-aarch64.conf > "$table/register"
}

make_root() {
  if [[ ! -e $root/usr/bin/python3 ]]; then
    rm -rf "$root"
    mmdebstrap --quiet --mode=root --variant=minbase --architectures=arm64 \
      --include=systemd,python3-venv,make,git,ca-certificates,procps,iproute2 bookworm "$root"
  fi
  mkdir -p "$root/srv/hearth"
  find "$root/srv/hearth" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
  copy_checkout "$source" "$root/srv/hearth"
}

register
for step in "${steps[@]}"; do
  if [[ $step == root ]]; then
    say "Debian 12 for arm64"
    make_root
  fi
done
mount_into "$root" "$folder/pip"
# It describes this machine's processor, not the emulated one: torch and onnxruntime, which read it, crashed when both were loaded.
mount -t tmpfs tmpfs "$root/sys/devices/system/cpu"
for step in "${steps[@]}"; do
  case $step in
    root) inside "$root" 'echo "$(uname -m), Debian $(cat /etc/debian_version), $(python3 --version)"' ;;
    install)
      say "README: install on a device"
      inside "$root" '/srv/hearth/systemd/install.sh --coordinator --key new < /dev/null'
      inside "$root" '/opt/hearth/bin/pip list --format=freeze' > "$folder/installed.txt"
      if grep -iE '^(nvidia-|cuda-|triton)' "$folder/installed.txt"; then fail "packages for CUDA were installed"; fi
      grep -iE '^(torch|onnxruntime|numpy|hearth)' "$folder/installed.txt"
      inside "$root" '/opt/hearth/bin/hearth doctor --key /etc/hearth/home.key' || true # no agent runs, and nothing else should fail
      ;;
    demo)
      say "make demo"
      # Its own targets first, since the demo itself runs in a network that reaches nothing.
      inside "$root" 'cd /srv/hearth && make .venv/installed .models/minilm/config.json'
      packages=$(echo "$root"/srv/hearth/.venv/lib/python3*/site-packages)
      cp "$here/qemu_sockets.py" "$packages/"
      echo 'import qemu_sockets' > "$packages/qemu_sockets.pth"
      (ENTER=(unshare --net bash -c 'ip link set lo up multicast on && ip route add 224.0.0.0/4 dev lo && exec "$@"' _)
        inside "$root" 'cd /srv/hearth && make demo DEMO_OPTIONS="--patience 10"')
      ;;
    exactness)
      say "exactness with small shapes, and every kernel of the matrix interface"
      inside "$root" 'cd /srv/hearth && .venv/bin/python -m pytest -v -n 2 --dist worksteal -p no:cacheprovider --hypothesis-profile few \
        -m "not processes and not slow" -k "test_matrices or test_kernels or random_cuts or \
        (every_strategy_and_split and hmp) or (logits_equal_transformers and (llama or qwen3))" \
        tests/agent/worker/transformer/test_matrices.py tests/agent/worker/transformer/test_kernels.py \
        tests/agent/worker/graph/test_engine.py tests/agent/worker/transformer/test_exactness.py \
        tests/agent/worker/transformer/generation/test_generation.py'
      ;;
    *) fail "unknown step: $step" ;;
  esac
done
say "arm64: done"
