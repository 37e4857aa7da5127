"""The host's environment: keys, mDNS, network interfaces, systemd, child processes, settings, units, asyncio helpers."""
