"""The protocol version, and the caps that both ends of a connection keep. Pure."""

from __future__ import annotations

PROTOCOL_VERSION = 2
DEFAULT_DEPLOYMENT = "default"  # of a coordinator that serves one model
MAX_MESSAGE_BYTES = 4 << 20  # a plan for 256 devices with its chunk list stays below this
MAX_PAYLOAD_FRAME_BYTES = 64 << 20  # one chunk, or one tensor
MAX_PAYLOAD_FRAMES = 64  # of one message
