"""The protocol version, and the size limits that both ends of a connection enforce. Pure."""

from __future__ import annotations

PROTOCOL_VERSION = 2  # contained in every message; peers of another version are refused
DEFAULT_DEPLOYMENT = "default"  # name of the deployment of a coordinator that serves one model
MAX_MESSAGE_BYTES = 4 << 20  # a plan for 256 devices with its chunk list stays below this
MAX_PAYLOAD_FRAME_BYTES = 64 << 20  # one chunk, or one tensor
MAX_PAYLOAD_FRAMES = 64  # per message
