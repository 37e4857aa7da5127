"""Which directives of Hearth's units have an effect here: read from the kernel, for the main process of each service."""

import subprocess
import sys
from pathlib import Path

SERVICES = ("hearth-agent", "hearth-coordinator", "hearth-gateway")


def show(service: str, name: str) -> str:
    """A property of a unit."""
    command = ["systemctl", "show", "--value", "--property", name, service]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def status(pid: str) -> dict[str, str]:
    """The fields of a process's status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cgroup_file(service: str, controller: str, *names: str) -> Path | None:
    """The first of these files of the cgroup of a service that is there, in version 1 or 2 of cgroups."""
    root, group = Path("/sys/fs/cgroup"), Path("system.slice", f"{service}.service")
    paths = (folder / group / name for folder in (root / controller, root, root / "unified") for name in names)
    return next(filter(Path.exists, paths), None)


def limit(service: str, controller: str, *names: str) -> str:
    """What the cgroup of a service says; empty if it has none of these files."""
    path = cgroup_file(service, controller, *names)
    return path.read_text().strip() if path else ""


def refuses_public_addresses(service: str) -> bool:
    """Whether a packet to a public address is refused in the service's cgroup, and one to this machine is not."""
    procs = cgroup_file(service, "unified", "cgroup.procs")
    if procs is None:
        return False
    code = (
        "import os, socket, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "def sent(to):\n"
        "    try: return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', (to, 9)) == 1\n"
        "    except PermissionError: return False\n"
        "sys.exit(0 if sent('192.168.77.10') and not sent('192.0.2.1') else 1)"
    )
    return subprocess.run([sys.executable, "-c", code, str(procs)], check=False).returncode == 0


def effects(service: str) -> dict[str, bool]:
    """Whether each directive that can be seen from outside has its effect on a service."""
    pid = show(service, "MainPID")
    process, root = status(pid), Path(f"/proc/{pid}/root")
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    read_only = {each[4] for each in mounts if "ro" in each[5].split(",")}
    user = subprocess.run(["ps", "-o", "user=", "-p", pid], capture_output=True, text=True, check=True).stdout.strip()
    found = {
        "User": user == "hearth",
        "NoNewPrivileges": process["NoNewPrivs"] == "1",
        "CapabilityBoundingSet": int(process["CapBnd"], 16) == 0,
        "SystemCallFilter and other filters": process["Seccomp"] == "2",
        "ProtectSystem": "/" in read_only,
        "ProtectKernelTunables": "/proc/sys" in read_only,
        "ProtectControlGroups": "/sys/fs/cgroup" in read_only,
        "PrivateTmp": any(each[4] == "/tmp" for each in mounts),
        "ProtectProc": any(each[4] == "/proc" and "hidepid" in each[-1] for each in mounts),
        "OOMScoreAdjust": Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == show(service, "OOMScoreAdjust"),
        "LimitCORE": "Max core file size        0                    0" in Path(f"/proc/{pid}/limits").read_text(),
        "MemoryMax": limit(service, "memory", "memory.max", "memory.limit_in_bytes") == show(service, "MemoryMax"),
        "TasksMax": limit(service, "pids", "pids.max") == show(service, "TasksMax"),
        "IPAddressDeny": refuses_public_addresses(service),
        "ProtectHostname": Path(f"/proc/{pid}/ns/uts").readlink() != Path("/proc/1/ns/uts").readlink(),
    }
    if show(service, "PrivateDevices") == "yes":
        found["PrivateDevices"] = not (root / "dev/console").exists()
    else:
        rules = limit(service, "devices", "devices.list")
        found["DevicePolicy"] = bool(rules) and not rules.startswith("a ")
    return found


for service in SERVICES:
    found = effects(service)
    without = [name for name, has in found.items() if not has]
    print(
        f"{service}: {len(found) - len(without)} of {len(found)} have their effect; without: {', '.join(without) or 'none'}"
    )
