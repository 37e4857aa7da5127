#!/bin/bash
# Hearth's services under a real systemd: Debian 12 in a container, with the package, agent, coordinator and gateway. Serves a
# model, cuts the power (SIGKILL of the whole container), serves again; upgrades and purges the package; runs install.sh twice in a
# clean root. Needs root and Debian. Nothing outside of FOLDER is changed but a network namespace, which goes at the end.
#
#   systemd.sh FOLDER
set -euo pipefail

here=$(dirname "$(realpath "$0")")
source "$here/lib.sh"
skip_unless "Hearth under systemd" mmdebstrap systemd-container iproute2
if [[ ${HEARTH_BOOT_INSIDE:-} != 1 ]]; then # all mounts and processes end with this one
  exec env HEARTH_BOOT_INSIDE=1 timeout --kill-after=10 40m unshare --mount --pid --fork --mount-proc --kill-child "$0" "$@"
fi

source=$(realpath "$here/../..") folder=$(realpath -m "$1")
base=$folder/root cache=$folder/pip network=hearth-boot
mkdir -p "$folder"
cleanup() { ip netns delete "$network" 2> /dev/null || true; }
trap cleanup EXIT

clean_root() { # NAME: an overlay over the base, fresh
  rm -rf "${folder:?}/$1"
  mkdir -p "$folder/$1"/{upper,work,merged}
  mount -t overlay overlay -o "lowerdir=$base,upperdir=$folder/$1/upper,workdir=$folder/$1/work" "$folder/$1/merged"
  box=$folder/$1/merged
}

boot() {
  : > "$folder/console.log"
  systemd-nspawn --quiet --register=no --keep-unit --directory "$box" --boot \
    --network-namespace-path="/run/netns/$network" < /dev/null >> "$folder/console.log" 2>&1 &
  nspawn=$!
  wait_until "the start of systemd" 30 pgrep --parent "$nspawn"
  leader=$(pgrep --parent "$nspawn" | head -n 1)
  wait_until "the end of the boot" 90 in_box 'systemctl is-system-running | grep -E "running|degraded"'
}

in_box() {
  nsenter --target "$leader" --mount --uts --ipc --net --pid \
    env -i PATH=/opt/hearth/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 HEARTH_KEY=/etc/hearth/home.key \
    bash -euo pipefail -c "$1"
}

cut_power() {
  kill -KILL "$leader" # of the namespace's first process: the kernel kills all others with it
  wait "$nspawn" || true
}

embed() { in_box 'hearth embed "Turn on the kitchen light." --json' > "$folder/$1" 2> "$folder/$1.error"; }

served() { # the answer, compared with the first one
  wait_until "an answer of the model" 180 embed "$1"
  python3 - "$folder/first.json" "$folder/$1" << 'TEXT'
import json, sys
def numbers(value):
    if isinstance(value, dict): return [n for key in sorted(value) if key in ("embeddings", "vectors", "vector", "embedding") for n in numbers(value[key])]
    if isinstance(value, list): return [n for each in value for n in numbers(each)]
    return [float(value)] if isinstance(value, (int, float)) else []
first, now = (numbers(json.load(open(path))) for path in sys.argv[1:])
assert first and len(first) == len(now), (len(first), len(now))
worst = max(abs(a - b) for a, b in zip(first, now))
assert worst < 1e-5, worst
print(f"served: {len(now)} numbers, at most {worst:.1e} from those of the first boot")
TEXT
}

# ---- the root, the network, the package --------------------------------------------------------------------------------

if [[ ! -e $base/usr/bin/python3 ]]; then
  say "a Debian 12 root"
  rm -rf "$base"
  mmdebstrap --quiet --mode=root --variant=minbase --include=systemd,systemd-sysv,dbus,python3-venv,procps bookworm "$base"
fi
[[ -e $source/.models/minilm/config.json ]] || fail "there is no model to serve: make .models/minilm/config.json"
cleanup
ip netns add "$network"
ip -n "$network" link set lo up
ip -n "$network" link add home0 type veth peer name home1 # its other end lies in the same namespace
ip -n "$network" address add 192.168.77.10/24 dev home0
ip -n "$network" link set home0 up multicast on
ip -n "$network" link set home1 up
ip -n "$network" route add default via 192.168.77.1

say "the package, and hearth-setup"
PYTHON=${PYTHON:-$source/.venv/bin/python}
export PYTHON
package=$("$source/systemd/deb.sh" "$folder" 2> "$folder/deb.log") || fail "the package: $(tail -n 3 "$folder/deb.log")"
newer=$("$source/systemd/deb.sh" "$folder" 9.9 2> "$folder/deb.log")
clean_root package
echo hearthbox > "$box/etc/hostname"
mkdir -p "$box/srv/models"
cp -r "$source/.models/minilm" "$box/srv/models/"
mount_into "$box" "$cache"
cp "$package" "$newer" "$box/tmp/"
offline() { unshare --net chroot "$box" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive "$@"; }
offline dpkg -i "/tmp/$(basename "$package")" # no network in maintainer scripts: there is none
inside "$box" 'getent passwd hearth > /dev/null' || fail "the package made no user"
inside "$box" 'hearth-setup --key new --coordinator --gateway'
inside "$box" 'hearth-setup > /tmp/again && cat /tmp/again' # idempotent: the key stays
inside "$box" 'test "$(stat -c %a%U /etc/hearth/home.key)" = 600root' || fail "the key's owner or mode"
echo 'HEARTH_SERVE_OPTIONS=/srv/models/minilm' >> "$box/etc/hearth/hearth-coordinator.env"
unmount_from "$box"

# ---- served, power cut, served again ---------------------------------------------------------------------------------

say "first boot"
boot
trouble() { in_box 'journalctl -b --no-pager -o cat -u "hearth-*" | tail -n 20' || true; }
wait_until "an answer of the model" 180 embed first.json
served second.json
in_box 'hearth devices' | tail -n 12
say "the gateway"
in_box 'umask 077; hearth key add-app gateway > /etc/hearth/gateway.key; hearth key add-app page --token > /root/token; systemctl restart hearth-gateway'
ask() {
  in_box 'python3 - << "TEXT"
import json, urllib.request
request = urllib.request.Request("http://127.0.0.1:47880/v1/models", headers={"Authorization": "Bearer " + open("/root/token").read().strip()})
print([each["id"] for each in json.load(urllib.request.urlopen(request, timeout=10))["data"]])
TEXT'
}
wait_until "an answer of the gateway" 60 ask
ask
say "what the services run under"
for service in hearth-agent hearth-coordinator hearth-gateway; do
  in_box "pid=\$(systemctl show -P MainPID $service); echo $service: \$(ps -o user= -p \$pid), \
    \$(grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/\$pid/status | tr -s '\t\n' ' ')"
done
in_box 'hearth doctor' || true
say "directives that this container cannot honour"
in_box python3 < "$here/effects.py"
in_box 'journalctl -b --no-pager -o cat _PID=1 | grep -iE "not support|ignoring|failed to|couldn.t|proceeding" | sort -u' || true
in_box 'systemd-analyze --no-pager security hearth-agent hearth-coordinator hearth-gateway | grep -i overall' || true

say "power cut"
cut_power
sed -i '/^HEARTH_SERVE_OPTIONS/d' "$box/etc/hearth/hearth-coordinator.env" # the state alone names the model now
boot
served third.json
in_box 'systemctl is-active hearth-agent hearth-coordinator hearth-gateway'
wait_until "an answer of the gateway" 60 ask

# ---- upgrade, remove, purge ------------------------------------------------------------------------------------------

say "upgrade"
cut_power
mount_into "$box" "$cache"
cp "$newer" "$box/tmp/"
echo '# mine' >> "$box/etc/hearth/hearth-agent.env"
key=$(sha256sum < "$box/etc/hearth/home.key")
offline dpkg -i "/tmp/$(basename "$newer")"
inside "$box" 'hearth-setup'
[[ $(sha256sum < "$box/etc/hearth/home.key") == "$key" ]] || fail "the key changed"
grep -q '^# mine' "$box/etc/hearth/hearth-agent.env" || fail "an edited setting was lost"
unmount_from "$box"
boot
served fourth.json
say "remove and purge"
in_box 'dpkg -r hearth-home'
in_box '! systemctl is-active --quiet hearth-agent && ! pgrep -u hearth > /dev/null && test -e /etc/hearth/home.key && test ! -e /opt/hearth' \
  || fail "after dpkg -r, something runs, or the key is gone"
in_box 'dpkg -P hearth-home'
left=$(in_box 'find / -xdev \( -path /proc -o -path /sys -o -path /var/log -o -path /run \) -prune -o -iname "*hearth*" -print \
  | grep -vE "^/(root/.cache|var/lib/dpkg/info/systemd|var/lib/private)" || true')
[[ -z $left ]] || fail "purge left: $left"
echo "nothing is left"
cut_power

# ---- install.sh in a clean root --------------------------------------------------------------------------------------

say "install.sh in a clean root, twice"
umount "$box"
clean_root install
copy_checkout "$source" "$box/srv/hearth"
mount_into "$box" "$cache"
if inside "$box" 'command -v hearth'; then fail "the root is not clean"; fi
inside "$box" '/srv/hearth/systemd/install.sh < /dev/null'
inside "$box" 'test ! -e /etc/hearth/home.key' || fail "a key appeared that nobody gave"
inside "$box" '/srv/hearth/systemd/install.sh --coordinator --key new < /dev/null; sha256sum /etc/hearth/home.key > /root/key'
inside "$box" '/srv/hearth/systemd/install.sh < /dev/null; sha256sum --check --quiet /root/key'
if inside "$box" '/srv/hearth/systemd/install.sh --coordinator --key new < /dev/null'; then fail "--key new replaced the home's key"; fi
inside "$box" 'line=$(/opt/hearth/bin/hearth key export --key /etc/hearth/home.key); rm /etc/hearth/home.key
  HEARTH_HOME_KEY=$line /srv/hearth/systemd/install.sh < /dev/null; /opt/hearth/bin/hearth key export --key /etc/hearth/home.key | grep -qxF -- "$line"'
inside "$box" 'systemctl is-enabled hearth-agent; test -z "$(find /srv/hearth -name build -o -name "*.egg-info")"'
unmount_from "$box"
boot
wait_until "the agent" 60 in_box 'systemctl is-active hearth-agent'
in_box 'hearth devices; systemctl is-active hearth-coordinator; hearth key add-device kitchen | grep -q ^hearth-device-1:'
cut_power
say "systemd: done"
