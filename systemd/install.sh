#!/bin/bash
# Installs Hearth on this device, or upgrades it: an environment in /opt/hearth, the units, their user, and the home's key.
# Run it as often as you like. Debian's package has it as `hearth-setup`.
set -euo pipefail

usage() {
  cat << 'TEXT'
usage: install.sh [OPTION...]    as root; installs or upgrades Hearth on this device

  --coordinator      also run the coordinator here (on one device of the home; a standby on another)
  --gateway          also run the HTTP gateway here; its key, in /etc/hearth/gateway.key with mode 600, is what this prints on the
                     coordinator's device: sudo /opt/hearth/bin/hearth key add-app gateway --key /etc/hearth/home.key
  --key new          with --coordinator, on the first device: make the home's key
  --key FILE         take the key from a file; -: from standard input. On a device, the line that `hearth key add-device NAME`
                     printed on the coordinator's; on another coordinator, that of `hearth key export`.
                     The variable HEARTH_HOME_KEY may hold the line, too. Without both, it is asked for on a terminal.
  --torch WHAT       install this build of torch or onnxruntime (a wheel, or a requirement); may be repeated. A Jetson needs
                     NVIDIA's.
  --cpu              on a Jetson: do without the GPU
  --small            only what an agent needs; without the commands `hearth key`, `hearth doctor` and so on
  --unverified       take packages from pip's index, without their SHA-256: for a mirror that lacks files.pythonhosted.org
  --python PROGRAM   Python 3.10 or newer, with its venv module (default: python3)
  --no-start         enable the services, but do not start them
  --detect           only say what this device is, and what would be installed
TEXT
}

fail() {
  echo "install.sh: $1" >&2
  exit "${2:-1}"
}

root=${HEARTH_SYSROOT:-} # tests detect other devices in a folder of theirs, and install into it
environment=$root/opt/hearth settings=$root/etc/hearth
services=(hearth-agent) extras=worker,coordinator,gateway
verified=yes key='' torch=() cpu='' small='' python=python3 start=yes detect=''
while (($#)); do
  case $1 in
    --coordinator) services+=(hearth-coordinator) ;;
    --gateway) services+=(hearth-gateway) ;;
    --key) key=${2:?--key needs new, a file, or -} && shift ;;
    --torch) torch+=("${2:?--torch needs a wheel or a requirement}") && shift ;;
    --cpu) cpu=yes ;;
    --small) small=yes ;;
    --unverified) verified='' ;;
    --python) python=${2:?--python needs a program} && shift ;;
    --no-start) start='' ;;
    --detect) detect=yes ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
  esac
  shift
done

# ---- what this device is ---------------------------------------------------------------------------------------------

machine=${HEARTH_MACHINE:-$(uname -m)} device='' jetpack=''
if [[ -e $root/etc/nv_tegra_release ]]; then
  release=$(sed -nE 's/^# R([0-9]+).*/\1/p' "$root/etc/nv_tegra_release" | head -n 1)
  case $release in
    36) jetpack=6 ;;
    38 | 39) jetpack=7 ;;
    3[0-5] | 2[0-9]) fail "this Jetson has L4T R$release (JetPack 5 or older): its Python is older than 3.10, and NVIDIA builds no torch for a newer one there. Install JetPack 6 or 7 on an Orin or Thor; a Nano, TX2 or Xavier cannot run them" ;;
    *) fail "this Jetson has L4T R${release:-?}, which Hearth does not know; it knows R36 (JetPack 6) and R38 or R39 (JetPack 7)" ;;
  esac
  device="Jetson, JetPack $jetpack"
elif grep -qa 'Raspberry Pi' "$root/proc/device-tree/model" 2> /dev/null; then
  device=$(tr -d '\0' < "$root/proc/device-tree/model")
else
  device="computer ($machine)"
fi
case $machine in
  x86_64 | aarch64) ;;
  arm*) fail "$device runs a 32-bit system, for which there is no torch: install the 64-bit one (on a Raspberry Pi 3 or newer)" ;;
  *) fail "there is no torch for this processor: $machine" ;;
esac
if [[ -n $small ]]; then
  extras=worker
  if ((${#services[@]} > 1)); then fail "--small leaves out what the coordinator and the gateway need" 2; fi
fi
if [[ -n $jetpack && -z $cpu ]]; then extras=${extras/worker/gpu}; fi
if [[ -n $detect ]]; then
  echo "$device: hearth-home[$extras]"
  exit 0
fi

# ---- the environment -------------------------------------------------------------------------------------------------

[[ $(id -u) == 0 ]] || fail "run it as root: sudo $0"
here=$(dirname "$(realpath "$0")")
shared=/usr/share/hearth-home # of Debian's package: wheel, pinned versions
if [[ -e $here/../pyproject.toml ]]; then from_checkout=yes; else from_checkout=''; fi
[[ -n $from_checkout || -d $shared ]] || fail "it belongs into the folder systemd of a checkout, or comes with Debian's package"
command -v "$python" > /dev/null || fail "$python is missing: apt-get install python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
  || fail "Python 3.10 or newer is needed, and $python is $("$python" -V 2>&1): name another with --python"
"$python" -c 'import ensurepip, venv' 2> /dev/null || fail "Python's venv module is missing: apt-get install python3-venv"
command -v systemd-sysusers > /dev/null || fail "systemd is missing, which starts Hearth's services: apt-get install systemd"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo "$device: installing Hearth into $environment (minutes at the first time)"
if [[ -e $environment/bin/python ]] && ! "$environment/bin/python" -c 'import pip' 2> /dev/null; then
  echo "the environment's Python is gone or was upgraded: making it again"
  "$python" -m venv --clear "$environment"
fi
[[ -x $environment/bin/python ]] || "$python" -m venv "$environment"
pip() { "$environment/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

if [[ -n $from_checkout ]]; then
  pins=$here/../constraints
  mkdir "$scratch/source" # pip would leave its build in the checkout, which belongs to somebody else
  cp -r "$here/.."/{agent,coordinator,hearth,pyproject.toml,README.md} "$scratch/source/"
  package=$scratch/source
else
  pins=$shared/constraints
  package=$(find "$shared" -name '*.whl' | sort | tail -n 1)
fi
# Before the name hearth-home: ours is known by its program, which the package of that name on the index does not have.
if pip show --files hearth 2> /dev/null | grep -q 'bin/hearth-agent'; then pip uninstall --yes hearth; fi
source=(-c "$pins.txt")
if [[ -n $verified ]]; then source+=(--no-index --find-links "$pins.html"); fi # its files, with their SHA-256, and no other
# NVIDIA's builds need other versions of numpy than the pinned ones.
if [[ -n $jetpack && -z $cpu ]]; then source=(); fi
if ((${#torch[@]})); then pip install "${torch[@]}" || fail "--torch could not be installed: see above"; fi
if [[ -n $jetpack && -z $cpu ]]; then
  "$environment/bin/python" -c 'import torch, onnxruntime' 2> /dev/null \
    || fail "a Jetson needs NVIDIA's torch and onnxruntime-gpu for JetPack $jetpack: run it again with --torch WHEEL for each, or with --cpu"
fi
pip install "${source[@]}" "$package[$extras]" || fail "the packages could not be installed: see above"
pip install "${source[@]}" --no-deps --force-reinstall "$package" # the same version, but perhaps a newer checkout

# ---- user, units, settings -------------------------------------------------------------------------------------------

mkdir -p "$settings"
if [[ -n $from_checkout ]]; then
  install -D -m 644 "$here/hearth.sysusers" "$root/etc/sysusers.d/hearth.conf"
  for service in hearth-agent hearth-coordinator hearth-gateway; do
    install -D -m 644 "$here/$service.service" "$root/etc/systemd/system/$service.service"
    [[ -e $settings/$service.env ]] || install -m 644 "$here/$service.env" "$settings/$service.env"
  done
  install -m 644 "$here/../README.md" "$environment/README.md"
else
  install -m 644 /usr/share/doc/hearth-home/README.md "$environment/README.md"
fi
systemd-sysusers hearth.conf

for service in hearth-coordinator hearth-gateway; do # those that ran here before are upgraded, too
  if [[ " ${services[*]} " != *" $service "* ]] && systemctl is-enabled --quiet "$service" 2> /dev/null; then services+=("$service"); fi
done
kind=device # the home's key stays on coordinators
if [[ " ${services[*]} " == *" hearth-coordinator "* ]]; then kind=home; fi

if [[ -e $settings/home.key && -z $key ]]; then
  echo "the key in $settings/home.key stays"
else
  line=${HEARTH_HOME_KEY:-}
  case $key in
    new) line=new ;;
    -) line=$(cat) ;;
    '') if [[ -z $line && -t 0 ]]; then
      if [[ $kind == home ]]; then
        echo "The home's key: press Enter to make a new home, or paste what \`hearth key export\` prints on its coordinator's device."
      else
        echo "This device's key: paste the line that this prints on the coordinator's device:"
        name=${HOSTNAME,,} name=${name//[^a-z0-9-]/-}
        echo "sudo /opt/hearth/bin/hearth key add-device ${name:0:32} --key /etc/hearth/home.key"
      fi
      read -rsp "> " line
      echo
      if [[ $kind == home ]]; then line=${line:-new}; fi
    fi ;;
    *) line=$(cat -- "$key") || fail "the key file cannot be read: $key" ;;
  esac
  if [[ -n $line ]]; then
    if [[ $line == new && -e $settings/home.key ]]; then fail "there is a key in $settings/home.key already, of which --key new would cut off the other devices"; fi
    # The line comes by standard input, so that no list of processes shows it.
    "$environment/bin/python" -c '
import sys
from pathlib import Path
from hearth.errors import HearthError
from hearth.platform import security
text = sys.stdin.read().strip()
try:
    key = security.new_home_key() if text == "new" else security.parse_credential(text, "the key that was given")
    if key.kind != sys.argv[2]:
        sys.exit(f"install.sh: this is a key of the kind {key.kind!r}; a coordinator (--coordinator) needs the home key, any other "
                 "device one of its own: the line that `hearth key add-device NAME` prints where the coordinator runs")
    security.save_credential(Path(sys.argv[1]), key, force=True)
except HearthError as error:
    sys.exit(f"install.sh: {error}")
' "$settings/home.key" "$kind" <<< "$line"
    chown root:root "$settings/home.key"
    chmod 600 "$settings/home.key"
  fi
fi

if [[ $kind == device && $(head -c 12 "$settings/home.key" 2> /dev/null) == hearth-home-* ]]; then
  echo "this device holds the home's key, but needs only one of its own: run it again with --key - and the line that"
  echo "\`hearth key add-device NAME\` prints on the coordinator's device"
fi
systemctl --quiet enable "${services[@]}"
if [[ ! -d /run/systemd/system ]]; then
  echo "installed; systemd does not run here, so ${services[*]} will start with it"
elif [[ -z $start ]]; then
  systemctl daemon-reload
  echo "installed; start it with: systemctl restart ${services[*]}"
elif [[ ! -e $settings/home.key ]]; then
  systemctl daemon-reload
  echo "installed, but there is no key yet: run it again with --key"
else
  systemctl daemon-reload
  for service in "${services[@]}"; do
    if [[ $service == hearth-gateway && ! -e $settings/gateway.key ]]; then
      echo "hearth-gateway waits for its key in $settings/gateway.key: see --gateway in the text of --help"
    else
      systemctl restart "$service" || fail "$service does not start: journalctl -u $service"
    fi
  done
  echo "running: ${services[*]}"
fi
