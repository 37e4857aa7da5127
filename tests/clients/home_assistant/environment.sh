#!/bin/bash
# Home Assistant in a folder of its own, with the Python 3.14 of Debian forky that it needs. Nothing outside is changed: apt
# downloads the packages, dpkg-deb unpacks them, and chroot runs them with mounts that end with the process. Needs root, and a
# Debian machine, whose apt knows Debian's keys.
#
#   environment.sh make FOLDER REQUIREMENTS    700 MB, about two minutes
#   environment.sh run FOLDER COMMAND...       in the environment; FOLDER/root/work is its /work
set -euo pipefail

action=$1 folder=$(realpath -m "$2")
shift 2
root=$folder/root

inside() { # run a command in the environment
  unshare --mount bash -c 'mount -t proc proc "$1/proc" && mount --bind /dev "$1/dev" && exec chroot "$@"' _ \
    "$root" /usr/bin/env -i HOME=/root PATH=/work/environment/bin:/usr/bin:/bin LANG=C.UTF-8 \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt "$@"
}

packages() { # download Debian's packages and unpack them
  mkdir -p "$folder"/{lists/partial,archives/partial}
  : > "$folder/status"
  local mirror keys=/usr/share/keyrings/debian-archive-keyring.gpg
  mirror=$(apt-get indextargets --format '$(SITE) $(REPO_URI)' 'Created-By: Packages' | awk '/debian\/?$/ {print $2; exit}')
  echo "deb [signed-by=$keys] ${mirror:-http://deb.debian.org/debian} forky main" > "$folder/sources.list"
  local apt=(apt-get -qq -o "Dir::State=$folder" -o "Dir::State::Lists=$folder/lists" -o "Dir::State::status=$folder/status"
    -o "Dir::Cache=$folder" -o "Dir::Cache::Archives=$folder/archives" -o "Dir::Etc::sourcelist=$folder/sources.list"
    -o Dir::Etc::sourceparts=- -o APT::Install-Recommends=0 -o Debug::NoLocking=1)
  "${apt[@]}" update
  "${apt[@]}" -y --download-only install \
    python3.14-venv python3.14-minimal libc6 libc-bin dash bash coreutils ca-certificates base-files libstdc++6 libgcc-s1
  mkdir -p "$root"
  for package in "$folder"/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
  mkdir -p "$root"/{proc,dev,tmp,root,work,etc/ssl/certs}
  cp /etc/resolv.conf /etc/hosts "$root/etc/"
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  rm -rf "$folder/archives" "$folder/lists"
}

case $action in
  make)
    packages
    cp "$1" "$root/work/requirements.txt"
    inside python3.14 -m venv /work/environment
    # A few packages are sources only, in plain Python: there is no compiler in here.
    inside python -m pip install --quiet --disable-pip-version-check --no-deps -r /work/requirements.txt
    ;;
  run) inside "$@" ;;
  *) echo "make or run" >&2; exit 2 ;;
esac
