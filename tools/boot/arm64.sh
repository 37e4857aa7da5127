#!/bin/bash
# Hearth on ARM, under emulation: a Debian 12 root for arm64 (the base of Raspberry Pi OS) in a folder of its own, where QEMU runs
# every program. Installs as README says, runs the demo, and compares with transformers and onnxruntime. Needs root and Debian.
# Speed, and kernels that QEMU's processor lacks, are not what it shows.
#
#   arm64.sh FOLDER [STEP...]    steps: root install demo exactness; by default all, in this order
set -euo pipefail

minutes=${HEARTH_ARM64_MINUTES:-60} # the whole run ends by then
if [[ $(id -u) != 0 || ! -e /etc/debian_version ]]; then
  echo "skipped: Hearth was not tried on arm64, since that needs root and Debian"
  exit 0
fi
for needed in mmdebstrap arch-test qemu-aarch64-static; do
  if ! command -v "$needed" > /dev/null; then
    echo "skipped: Hearth was not tried on arm64: apt-get install mmdebstrap arch-test qemu-user-static"
    exit 0
  fi
done
if [[ ${HEARTH_ARM64_INSIDE:-} != 1 ]]; then # mounts end with this process, and all of it at the deadline
  exec env HEARTH_ARM64_INSIDE=1 timeout --kill-after=10 "${minutes}m" unshare --mount --pid --fork --mount-proc --kill-child "$0" "$@"
fi

source=$(realpath "$(dirname "$0")/../..") folder=$(realpath -m "$1")
shift
steps=("$@")
((${#steps[@]})) || steps=(root install demo exactness)
root=$folder/root
mkdir -p "$folder"

register() { # programs for arm64 start with QEMU, which the kernel opens now: the root needs no copy of it
  local table=/proc/sys/fs/binfmt_misc
  [[ -e $table/register ]] || mount -t binfmt_misc none "$table"
  if ! arch-test arm64 > /dev/null; then tr -d '\n' < /usr/lib/binfmt.d/qemu-aarch64.conf > "$table/register"; fi
}

inside() { # run a command in the root
  local index
  index=$(python3 -m pip config get global.index-url 2> /dev/null || true)
  chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 CI=true \
    PIP_NO_COMPILE=1 PIP_CERT=/etc/ssl/certs/ca-certificates.crt ${index:+"PIP_INDEX_URL=$index"} \
    HEARTH_TEST_PATIENCE=10 bash -c "cd /srv/hearth && $1"
}

say() { echo "== $* ($((SECONDS / 60)) min)"; }

make_root() {
  if [[ ! -e $root/usr/bin/python3 ]]; then
    rm -rf "$root"
    # The mirrors are those of this machine.
    mmdebstrap --quiet --mode=root --variant=minbase --architectures=arm64 \
      --include=python3-venv,make,git,ca-certificates,procps,iproute2 bookworm "$root"
  fi
  find "$root/srv/hearth" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} + 2> /dev/null || true
  mkdir -p "$root/srv/hearth"
  (cd "$source" && git ls-files -z --cached --others --exclude-standard | tar --null --ignore-failed-read -cf - -T - 2> /dev/null) \
    | tar -xf - -C "$root/srv/hearth"
  if [[ -e $source/.models/minilm/config.json ]]; then
    mkdir -p "$root/srv/hearth/.models"
    cp -r "$source/.models/minilm" "$root/srv/hearth/.models/"
  fi
}

enter() {
  cp /etc/resolv.conf /etc/hosts "$root/etc/"
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs tmpfs "$root/tmp"
}

register
for step in "${steps[@]}"; do [[ $step != root ]] || { say "a Debian 12 root for arm64"; make_root; }; done
enter
for step in "${steps[@]}"; do
  case $step in
    root) inside 'echo "$(uname -m), Debian $(cat /etc/debian_version), $(python3 --version)"' ;;
    install)
      say "README: install on a device"
      inside "python3 -m venv /opt/hearth && /opt/hearth/bin/pip install --quiet -c constraints.txt '.[worker,coordinator,gateway]'"
      inside '/opt/hearth/bin/pip list --format=freeze' > "$folder/installed.txt"
      if grep -iE '^(nvidia-|cuda-|triton)' "$folder/installed.txt"; then
        echo "failed: packages for CUDA were installed" >&2
        exit 1
      fi
      grep -iE '^(torch|onnxruntime|numpy|hearth)' "$folder/installed.txt"
      inside '/opt/hearth/bin/hearth key new --key /etc/hearth/home.key && /opt/hearth/bin/hearth doctor --key /etc/hearth/home.key || true'
      ;;
    demo)
      say "make demo"
      inside 'make demo'
      ;;
    exactness)
      say "exactness and kernels"
      inside '.venv/bin/python -m pytest -p no:cacheprovider tests'
      ;;
    *)
      echo "unknown step: $step" >&2
      exit 2
      ;;
  esac
done
say "arm64: done"
