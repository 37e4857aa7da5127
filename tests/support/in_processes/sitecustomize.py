"""Python imports this at the start of the processes of a `TestHome`: they log accesses to files from their event loops."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("file_calls", Path(__file__).parents[1] / "file_calls.py")
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.watch(lambda access: print(f"{_module.MARK} {access}", file=sys.stderr, flush=True))
