# Shared by the scripts of this folder: a Debian 12 root, its entry, and pip as this machine has it. Sourced, with bash.
# Mirror and package index are those that this machine is configured with; nothing here names one.

say() { echo "== $* ($((SECONDS / 60)):$(printf %02d $((SECONDS % 60))))"; }

fail() {
  echo "failed: $*" >&2
  exit 1
}

skip_unless() { # WHAT PACKAGE... : ends with a visible reason where the run is not possible
  local what=$1
  shift
  if [[ $(id -u) != 0 || ! -e /etc/debian_version ]]; then
    echo "skipped: $what was not tried, since that needs root and Debian"
    exit 0
  fi
  if ! dpkg-query --show "$@" > /dev/null 2>&1; then
    echo "skipped: $what was not tried: apt-get install $*"
    exit 0
  fi
}

copy_checkout() { # SOURCE FOLDER: what git tracks or would, and the model of the demo if it is there
  mkdir -p "$2"
  (cd "$1" && git ls-files -z --cached --others --exclude-standard \
    | tar --null --ignore-failed-read -cf - -T - 2> /dev/null) | tar --no-same-owner -xf - -C "$2"
  if [[ -e $1/.models/minilm/config.json ]]; then
    mkdir -p "$2/.models"
    cp -r "$1/.models/minilm" "$2/.models/"
  fi
}

mount_into() { # ROOT CACHE: what a chroot needs, name resolution and certificates among it
  local folder
  mkdir -p "$1/etc/ssl/certs" "$1/root/.cache/pip" "$2"
  cp --remove-destination /etc/resolv.conf /etc/hosts "$1/etc/"
  cp /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/"
  mount -t proc proc "$1/proc"
  mount --rbind /sys "$1/sys"
  mount --rbind /dev "$1/dev"
  mount -t tmpfs tmpfs "$1/tmp"
  mount --bind "$2" "$1/root/.cache/pip"
  for folder in $(pip_folders); do # wheels on this machine's disk
    mkdir -p "$1$folder"
    mount --bind "$folder" "$1$folder"
  done
}

unmount_from() { # ROOT
  local folder
  for folder in $(pip_folders) /root/.cache/pip /tmp /dev /sys /proc; do umount --recursive "$1$folder"; done
}

pip_folders() { # local folders in which pip looks for wheels
  local folder
  for folder in $(pip_setting find-links); do
    if [[ $folder == /* && -d $folder ]]; then echo "$folder"; fi
  done
}

pip_setting() { python3 -m pip config get "${2:-global}.$1" 2> /dev/null || python3 -m pip config get ":env:.$1" 2> /dev/null || true; }

inside() { # ROOT COMMAND: a shell command in the root; PASSED: its variables, ENTER: a command that runs the chroot
  local variables=(HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 CI=true DEBIAN_FRONTEND=noninteractive
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 ${PASSED[@]+"${PASSED[@]}"}) value
  value=$(pip_setting index-url)
  if [[ -n $value ]]; then variables+=("PIP_INDEX_URL=$value"); fi
  value=$(pip_folders)
  if [[ -n $value ]]; then variables+=("PIP_FIND_LINKS=${value//$'\n'/ }"); fi
  ${ENTER[@]+"${ENTER[@]}"} chroot "$1" /usr/bin/env -i "${variables[@]}" bash -euo pipefail -c "$2"
}

wait_until() { # WHAT SECONDS COMMAND...: tries it once a second
  local what=$1 deadline=$((SECONDS + $2))
  shift 2
  until "$@" > /dev/null 2>&1; do
    if ((SECONDS > deadline)); then
      if declare -F trouble > /dev/null; then trouble; fi # what the caller shows of a failure
      fail "$what did not happen in time"
    fi
    sleep 1
  done
}
