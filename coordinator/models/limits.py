"""Limits of what is read of a model, which anybody may have made. Beyond them its error says which one; all are generous."""

from __future__ import annotations

# ---- files ----------------------------------------------------------------------------------------------------------------
MAX_TEXT_BYTES = 128 << 20  # of a config, a tokenizer, a template, an index: tokenizers with 262,144 tokens have 33 MB
MAX_GRAPH_BYTES = 16 << 20  # of a graph in JSON, which takes about 20 times as much memory while it is parsed
MAX_HEADER_BYTES = 16 << 20  # of a safetensors file: 120,000 tensors
MAX_GROWTH = 64  # of a text, in the normalizer or the decoder of a tokenizer; Unicode's forms make one letter of 18
MAX_AXES = 64  # of a tensor, as numpy has it

# ---- operator graphs ------------------------------------------------------------------------------------------------------
MAX_JSON_OPERATORS = 100_000  # of a graph in JSON: planning time grows with them
MAX_PROTO_BYTES = 128 << 20  # of an ONNX file without its large weights
# Of an ONNX file, with bodies, and with functions wherever they are called. Networks have a few thousand; each takes 0.2 ms.
MAX_NODES = 20_000
MAX_NESTING = 8  # of bodies of control flow in each other
MAX_CALL_DEPTH = 32  # of functions that call each other
MAX_EQUATION = 256  # characters of an Einsum
MAX_TENSOR_BYTES = 1 << 50  # of a tensor between nodes

# ---- the process that opens a model before the coordinator does -----------------------------------------------------------
OPEN_MEMORY_BYTES = 480 << 20  # more than its libraries take
# Of processor time: the greater of these seconds, and this factor times what importing its libraries took.
OPEN_CPU_SECONDS, OPEN_CPU_FACTOR = 8.0, 10.0
OPEN_SECONDS = 240.0  # by the clock: on a computer that is busy, or from a disk that is slow

# ---- the process that renders a chat template -----------------------------------------------------------------------------
RENDER_MEMORY_BYTES = 256 << 20  # more than its libraries take
RENDER_SECONDS = 5.0  # of one chat, by the clock
# The most characters of its text: this factor times the bytes of the chat, and this many more.
RENDERED_FACTOR, RENDERED_CHARACTERS = 2, 1 << 20
