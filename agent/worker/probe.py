"""Print the CUDA device that torch finds as a JSON object, or null. A short-lived child process of the daemon."""

from __future__ import annotations

import json

import torch

if __name__ == "__main__":
    found = None
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        found = {"name": name, "memory_total_bytes": total, "memory_free_bytes": free}
    print(json.dumps(found))
