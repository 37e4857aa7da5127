"""The host's surroundings: keys, mDNS, interfaces, systemd, units, asyncio helpers."""
