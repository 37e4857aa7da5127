"""onnxruntime without its telemetry, which reports sessions and the computer that they run on unless it is switched off."""

import onnxruntime as ort

__all__ = ["ort"]

ort.disable_telemetry_events()
